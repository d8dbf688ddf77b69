"""Raw bytes to events: wherever reads are cut, the same text at the time of the read that completed it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load_client import Exchange
from benchmarks.load_events import Outcome, outcome
from benchmarks.load_plan import Drawer
from benchmarks.load_report import report
from tests.fakes.openai_server import plan

_EVENTS = [b'data: {"choices":[{"text":" a%d","finish_reason":null}]}\n\n' % i for i in range(5)]
_END = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _parsed(reads: list[bytes]) -> Outcome:
    exchange = Exchange(0, [(at, data) for at, data in enumerate(reads)])
    return outcome(exchange, asked=5, client=0, turn=0)


@given(cuts=st.lists(st.integers(1, 700), max_size=40), whole_events=st.booleans())
def test_reads_may_be_cut_anywhere(cuts: list[int], whole_events: bool) -> None:
    body = b"".join(_EVENTS) + _END
    pieces = [*_EVENTS, _END] if whole_events else [body[i : i + 17] for i in range(0, len(body), 17)]
    stream = _HEAD + b"".join(_chunk(p) for p in pieces) + b"0\r\n\r\n"
    places = sorted({c for c in cuts if c < len(stream)} | {len(stream)})
    reads = [stream[a:b] for a, b in zip([0, *places[:-1]], places, strict=True)]
    seen = _parsed(reads)
    assert (seen.error, seen.tokens, seen.prompt_tokens, seen.text) == ("", 5, 3, " a0 a1 a2 a3 a4")
    if whole_events:
        line_ends = list(accumulate((len(_chunk(p)) for p in _EVENTS), initial=len(_HEAD)))[1:]
        expected = [bisect_left(places, end - 3) for end in line_ends]  # the chunk's and the event's own last bytes
        assert seen.times == expected


def test_an_unfinished_chunk_counts_as_far_as_it_came() -> None:
    stream = _HEAD + _chunk(_EVENTS[0]) + _chunk(_EVENTS[1])[:30]
    exchange = Exchange(0, [(1, stream)], cut=True)
    seen = outcome(exchange, asked=5, client=0, turn=0)
    assert (seen.error, seen.cut, seen.text, seen.tokens) == ("", True, " a0", -1)


def _outcome(client: int, begin: int, times: list[int], asked: int) -> Outcome:
    ms = 10**6
    return Outcome(begin * ms, times[-1] * ms, begin * ms, asked, client, 0, "", False, [t * ms for t in times], asked)


def test_figures_by_hand() -> None:
    # Two clients; one has an event every 500 ms from 500 on, the other every 1000 ms with two tokens each from 1000 on.
    seen = [
        _outcome(0, 0, list(range(500, 4500, 500)), 8),
        _outcome(1, 0, [1000, 2000, 3000, 4000], 8),
    ]
    figures = report(seen, 0, 3000 * 10**6)
    assert figures["output_tok_s"] == {"total": 4.0, "steady": 4.0, "steady_window_s": 2.0}
    assert figures["ttft_ms"]["p50"] == 750 and figures["ttft_ms"]["max"] == 1000
    assert figures["itl_ms"]["p50"] == 500 and figures["itl_ms"]["max"] == 500
    assert figures["event_gap_ms"]["max"] == 1000
    assert figures["e2e_ms"]["max"] == 4000
    assert figures["tokens"]["per_event"] == round(16 / 12, 3)


def test_a_cut_request_counts_like_the_others() -> None:
    whole, cut = _outcome(0, 0, [1000, 2000, 3000], 9), _outcome(1, 0, [1500, 2500], -1)
    cut.cut = True
    tokens = report([whole, cut], 0, 3000 * 10**6)["tokens"]
    assert (tokens["by_usage"], tokens["output"], tokens["events_with_text"], tokens["per_event"]) == (9, 15, 5, 3.0)
    assert report([cut], 0, 3000 * 10**6)["tokens"]["output"] == 2


def test_nothing_at_all() -> None:
    figures = report([], 0, 0)
    assert figures["requests"]["sent"] == 0 and figures["output_tok_s"] == {"total": 0.0}


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_of_arrivals(burstiness: float, variation: float) -> None:
    bursty = plan(
        "--seed", "1", "--workload", "bursty", "--rate", "10", "--burstiness", str(burstiness), "--input-len", "1"
    )
    jobs = Drawer(bursty, 0).jobs()
    gaps = np.array([next(jobs).wait_s for _ in range(20_000)])
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_random_lengths_and_repeatability() -> None:
    random = plan(
        "--seed", "1", "--workload", "random", "--input-len", "100", "--output-len", "50", "--prefix-len", "10"
    )
    draw = Drawer(random, 3).jobs()
    jobs = [next(draw) for _ in range(300)]
    sizes = [len(job.body["prompt"]) - 10 for job in jobs]
    assert min(sizes) >= 10 and max(sizes) == 100 and min(sizes) < 15
    assert {job.asked for job in jobs} == set(range(5, 51))
    assert len({tuple(job.body["prompt"][:10]) for job in jobs}) == 1
    again = Drawer(random, 3).jobs()
    assert [next(again) for _ in range(300)] == jobs
    other = Drawer(random, 4).jobs()
    assert next(other).body["prompt"][10:] != jobs[0].body["prompt"][10:]
