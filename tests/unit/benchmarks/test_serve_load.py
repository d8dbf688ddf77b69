"""The load generator against a server of known pace and known faults: it reports what is, and hides nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.serve_load import orders_of, run
from tests.fakes.openai_server import PacedServer, plan


def test_counts_and_pace() -> None:
    with PacedServer(first_s=0.1, gap_s=0.03) as server:
        figures = run(plan("--clients", "3", "--requests", "7", "--output-len", "20"), server.base)
    assert figures["requests"] == {"sent": 7, "complete": 7, "failed": 0, "cut_at_the_end": 0}
    assert figures["errors"] == {}
    tokens = figures["tokens"]
    assert (tokens["asked"], tokens["by_usage"], tokens["events_with_text"], tokens["equal"]) == (140, 140, 140, True)
    assert (tokens["prompt"], tokens["prompt_cached"], tokens["per_event"]) == (56, 7, 1.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(median(server.firsts_ms()), rel=0.2, abs=15)
    assert figures["itl_ms"]["p50"] == pytest.approx(median(server.gaps_ms()), rel=0.1, abs=2)
    assert figures["itl_ms"]["mean"] == pytest.approx(fmean(server.gaps_ms()), rel=0.1)
    assert figures["itl_ms"] == figures["event_gap_ms"]
    e2e = 0.1 + 19 * 0.03
    whole = median(1e3 * (times[-1] - times[0]) for times in server.sent.values())
    assert figures["e2e_ms"]["p50"] == pytest.approx(whole, rel=0.1, abs=15) and whole >= e2e * 1e3
    assert figures["wall_s"] >= 3 * e2e  # three rounds of three clients
    assert figures["output_tok_s"]["total"] == pytest.approx(140 / figures["wall_s"], rel=0.01)
    assert server.most_at_once == 3
    assert all(len(body["prompt"]) == 8 and body["ignore_eos"] for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 7


def test_several_tokens_in_an_event() -> None:
    with PacedServer(gap_s=0.04, per_event=4, newline=b"\r\n") as server:
        figures = run(plan("--clients", "1", "--requests", "2", "--output-len", "32"), server.base)
    assert figures["tokens"]["per_event"] == 4.0 and figures["tokens"]["by_usage"] == 64
    assert figures["event_gap_ms"]["p50"] == pytest.approx(median(server.gaps_ms()), rel=0.1, abs=2)
    assert figures["itl_ms"]["p50"] == pytest.approx(figures["event_gap_ms"]["p50"] / 4, rel=0.01)


def test_the_steady_window_is_free_of_start_and_end() -> None:
    with PacedServer(first_s=0.5, gap_s=0.01) as server:
        figures = run(plan("--clients", "2", "--duration", "2.5", "--output-len", "1000"), server.base)
    assert figures["requests"] == {"sent": 2, "complete": 0, "failed": 0, "cut_at_the_end": 2}
    rates = figures["output_tok_s"]
    opened = max(times[1] for times in server.sent.values())
    closed = opened + rates["steady_window_s"]
    inside = sum(opened < at <= closed for times in server.sent.values() for at in times[1:])
    assert 1.0 <= rates["steady_window_s"] <= 2.1
    assert rates["steady"] == pytest.approx(inside / rates["steady_window_s"], rel=0.1)
    assert rates["total"] < rates["steady"]


def test_whichever_limit_comes_first() -> None:
    with PacedServer(gap_s=0.02) as server:
        few = run(plan("--clients", "2", "--requests", "4", "--duration", "30"), server.base)
        flags = ("--requests", "400", "--duration", "1", "--output-len", "4000")
        short = run(plan("--clients", "2", *flags), server.base)
    assert few["requests"]["complete"] == 4 and few["wall_s"] < 25
    assert short["requests"] == {"sent": 2, "complete": 0, "failed": 0, "cut_at_the_end": 2}
    assert 0.8 < short["wall_s"] < 5


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("status", "HTTP 503"),
        ("drop", "connection"),
        ("error_event", "engine fault"),
        ("no_done", "without [DONE]"),
        ("usage", "another number of tokens"),
        ("finish", "finish_reason error"),
        ("garbage", "unreadable"),
        ("stall", "no end after 1 s"),
    ],
)
def test_a_failure_is_reported_and_the_rest_counts(fault: str, said: str) -> None:
    with PacedServer(faults={2: fault}) as server:
        figures = run(plan("--clients", "2", "--requests", "6"), server.base, timeout_s=1.0)
    assert figures["requests"] == {"sent": 6, "complete": 5, "failed": 1, "cut_at_the_end": 0}
    ((reason, count),) = figures["errors"].items()
    assert said in reason and count == 1
    assert figures["tokens"]["by_usage"] == figures["tokens"]["asked"] == 30


def test_a_server_that_is_not_there() -> None:
    with PacedServer() as server:
        base = server.base
    figures = run(plan("--clients", "2", "--requests", "3"), base)
    assert figures["requests"]["failed"] == 3 and figures["requests"]["complete"] == 0
    assert "cannot connect" in next(iter(figures["errors"]))


def test_conversations_carry_their_answers() -> None:
    flags = ("--workload", "multi-turn", "--clients", "2", "--turns", "3", "--prefix-len", "5")
    with PacedServer() as server:
        figures = run(plan(*flags), server.base)
        whole = list(server.bodies)
        fresh = run(plan(*flags, "--only-new"), server.base)
    assert figures["requests"]["complete"] == fresh["requests"]["complete"] == 6
    assert [t["prompt_tokens"] for t in figures["turns"]] == [13, 13 + 6 + 8, 13 + 2 * (6 + 8)]
    assert [t["prompt_tokens"] for t in fresh["turns"]] == [13, 8, 8]
    prompts = sorted((body["prompt"] for body in whole), key=len)
    prefix = " ".join(prompts[0].split()[:5])
    assert all(prompt.startswith(" " + prefix) for prompt in prompts)
    for early in prompts[:2]:
        later = [p for p in prompts if p.startswith(early)]
        assert len(later) == 3 and later[1].startswith(early + " w" * 6)


def test_arrivals_do_not_wait_for_answers() -> None:
    with PacedServer(first_s=0.4) as server:
        figures = run(plan("--workload", "bursty", "--rate", "50", "--requests", "25", "--spread", "1"), server.base)
    assert figures["requests"]["complete"] == 25
    assert server.most_at_once > 8
    assert figures["wall_s"] < 25 * 0.4


def test_unstreamed_and_without_usage() -> None:
    with PacedServer(first_s=0.05) as server:
        figures = run(plan("--clients", "2", "--requests", "4", "--no-stream"), server.base)
        assert figures["tokens"]["by_usage"] == 24 and figures["requests"]["complete"] == 4
        assert figures["output_tok_s"]["total"] == pytest.approx(24 / figures["wall_s"], rel=0.01)
    with PacedServer(usage=False) as server:
        figures = run(plan("--clients", "2", "--requests", "4"), server.base)
        assert figures["tokens"]["without_usage"] == 4 and figures["tokens"]["events_with_text"] == 24


def test_work_is_dealt_out_whole() -> None:
    orders = orders_of(plan("--clients", "7", "--requests", "10"), "http://x/v1", 1.0, 3)
    assert sorted(c for o in orders for c in o.clients) == list(range(7))
    assert sum(o.requests for o in orders) == 10
    assert len(orders_of(plan("--clients", "4", "--requests", "2"), "http://x/v1", 1.0, 4)) == 2


def test_processes_share_the_load() -> None:
    with PacedServer(gap_s=0.01) as server:
        figures = run(plan("--clients", "4", "--requests", "12"), server.base, processes=3)
    assert figures["client"]["processes"] == 3
    assert figures["requests"]["complete"] == 12
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12


def test_no_two_runs_send_the_same_prompts() -> None:
    """A server's prefix cache would know them."""
    with PacedServer() as server:
        for _ in range(2):
            run(plan("--clients", "2", "--requests", "4"), server.base)
        again = plan("--clients", "2", "--requests", "4", "--seed", "7")
        assert again == plan("--clients", "2", "--requests", "4", "--seed", "7")
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 8


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    flags = ["--clients", "2", "--requests", "4", "--output-len", "5", "--input-len", "4", "--warmup", "1"]
    with PacedServer(faults={3: "status"}) as server:
        done = _command("--url", server.base, "--out", str(out), *flags)
        assert done.returncode == 1, done.stderr
        assert "FAILED 1 x HTTP 503" in done.stdout
        again = _command("--url", server.base, *flags)
        assert again.returncode == 0, again.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"schema", "benchmark", "commit", "machine", "versions", "command", "settings", "figures", "ratios"} <= set(
        result
    )
    assert result["figures"]["requests"]["failed"] == 1
    assert len(server.bodies) == 10  # with two for warming up


def _command(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.serve_load", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
