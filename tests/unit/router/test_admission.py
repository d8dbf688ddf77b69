"""Admission rules, and admission in a world of the real engine core without a model (`benchmarks/router_sim.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.router_sim import EOS, Replay, Request
from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.router.admission import (
    AdmissionPolicy,
    Admitted,
    Candidate,
    Decision,
    Held,
    Limits,
    Snapshot,
)
from inferserve.router.output_lengths import OutputLengths

POOL = 600
LIMITS = Limits(kv_tokens=POOL, max_rows=8, batch_max_tokens=100, first_chunk=50, token_ratio=0.0, prefix_cache=True)


def config(ratio: float, cache: bool = True, rows: int = 8) -> ServerConfig:
    return ServerConfig(
        model=ModelPart(max_req_total_len=2048, eos_id=(EOS,)),
        facts=ModelFacts(vocab_size=1_000_000),
        engine=EnginePart(disable_dynamic_prompt_cache=not cache, pipeline_depth=1),
        schedule=SchedulePart(
            running_max_req_size=rows,
            max_queued_requests=64,
            batch_max_tokens=64,
            chunked_prefill_size=48,
            router_token_ratio=ratio,
        ),
    )


def snapshot(rows: list[tuple[int, int, int]], lengths: OutputLengths | None = None, paused: int = 0) -> Snapshot:
    """Rows as (own prompt tokens, generated, limit)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Snapshot(
        own=table[:, 0],
        generated=table[:, 1],
        limit=table[:, 2],
        always_full=np.zeros(len(table), np.bool_),
        first_tokens=np.full(len(table), 10, np.int64),
        shared=0,
        paused=paused,
        lengths=(lengths or OutputLengths(2048)).curve(),
    )


def candidate(prompt: int, max_tokens: int, rows: int = 1, ignore_eos: bool = False) -> Candidate:
    return Candidate(rows, prompt + rows - 1, (), min(prompt, 50), max_tokens, ignore_eos)


def decide(rows: list[tuple[int, int, int]], asks: Candidate, limits: Limits = LIMITS, paused: int = 0) -> Decision:
    return AdmissionPolicy(limits).open(snapshot(rows, paused=paused)).consider(asks)


def test_a_row_that_ends_soon_makes_room_for_the_future_of_another() -> None:
    ends_soon = (400, 90, 100)
    lives = 10 + 2  # steps until its KV is free
    room = POOL - (400 + 90 + lives) - lives
    assert decide([ends_soon], candidate(room, 500)) == Admitted()
    assert decide([ends_soon], candidate(room + 1, 500)) == Held("kv")
    assert decide([(400, 10, 100)], candidate(room, 500)) == Held("kv")


def test_a_row_that_has_not_started_may_be_late_and_is_not_counted_as_gone() -> None:
    assert decide([(400, 1, 10)], candidate(100, 95)) == Admitted()
    assert decide([(400, 0, 10)], candidate(100, 95)) == Held("kv")
    assert decide([(400, 0, 10)], candidate(100, 90)) == Admitted()


def test_reasons_to_hold() -> None:
    small = candidate(5, 5)
    assert decide([(10, 1, 20)], small, paused=1) == Held("paused")
    assert decide([(1, 1, 2)] * 8, small) == Held("rows")
    assert decide([(1, 1, 2)] * 7, candidate(5, 5, rows=2)) == Held("rows")
    many = Limits(POOL, 100, 20, 50, 0.0, True)
    assert decide([(10, 0, 20)] * 4, small, many) == Held("prefill")
    assert decide([(10, 1, 20)] * 4, small, many) == Admitted()


def test_what_fits_alone_runs_on_an_idle_engine() -> None:
    policy = AdmissionPolicy(LIMITS)
    assert policy.refusal(500, 100) == ""
    assert decide([], candidate(500, 100)) == Admitted()
    for number in ("500", "101", "601", "600"):
        assert number in policy.refusal(500, 101)


def test_a_group_too_large_for_the_engine_runs_in_parts() -> None:
    policy = AdmissionPolicy(LIMITS)
    assert policy.together(4, 100, 100) == 4
    assert policy.together(5, 100, 100) == 4
    assert policy.together(16, 10, 10) == 8
    assert policy.together(2, 100, 500) == 1
    no_cache = AdmissionPolicy(Limits(POOL, 8, 100, 50, 0.0, False))
    assert no_cache.together(5, 100, 100) == 3
    assert no_cache.prompt_tokens(3, 100, 0) == 300 and policy.prompt_tokens(3, 100, 60) == 42


def test_expected_lengths_count_below_the_ratio_only() -> None:
    lengths = OutputLengths(2048)
    for _ in range(100):
        lengths.observe(20, ended=True)
    asks = candidate(50, 500)
    rows = [(50, 10, 500)] * 2
    for ratio, now, decision in [
        (0.0, rows, Held("kv")),
        (0.5, rows, Admitted()),
        (0.1, rows, Held("kv")),
        (1.0, [(230, 10, 500)] * 2, Admitted()),
        (0.5, [(230, 10, 500)] * 2, Held("kv")),
    ]:
        limits = Limits(POOL, 8, 100, 50, ratio, True)
        assert AdmissionPolicy(limits).open(snapshot(now, lengths)).consider(asks) == decision
    limits = Limits(POOL, 8, 100, 50, 0.5, True)
    for ignore_eos, decision in [(True, Held("kv")), (False, Admitted())]:
        round_ = AdmissionPolicy(limits).open(snapshot(rows, lengths))
        assert round_.consider(candidate(50, 500, ignore_eos=ignore_eos)) == Admitted()
        assert round_.consider(candidate(50, 500, ignore_eos=ignore_eos)) == decision


def test_what_was_admitted_counts_for_the_next() -> None:
    round_ = AdmissionPolicy(LIMITS).open(snapshot([(10, 1, 20)]))
    assert round_.consider(candidate(100, 150)) == Admitted()
    assert round_.consider(candidate(100, 150)) == Admitted()
    assert round_.consider(candidate(100, 150)) == Held("kv")
    assert round_.peak() == 500


requests = st.lists(
    st.builds(
        lambda arrival, prefix, rest, limit, lengths, abort: (arrival, prefix, rest, limit, lengths, abort),
        st.integers(0, 60),
        st.sampled_from([(), (1,), (1, 2), (3,)]),
        st.integers(1, 150),
        st.integers(1, 200),
        st.lists(st.integers(1, 200), min_size=1, max_size=4),
        st.one_of(st.just(-1), st.integers(0, 80)),
    ),
    min_size=1,
    max_size=25,
)
Drawn = list[tuple[int, tuple[int, ...], int, int, list[int], int]]


def trace(drawn: Drawn) -> list[Request]:
    """Prompts of shared granules and a rest of their own."""
    out = []
    for number, (arrival, prefix, rest, limit, lengths, abort) in enumerate(drawn):
        granules = [np.full(256, g, np.int32) for g in prefix]
        prompt = np.concatenate([*granules, np.full(rest, 1000 + number, np.int32)]).astype(np.int32)
        out.append(Request(arrival, prompt, limit, tuple(lengths), abort_at=abort))
    return out


@settings(max_examples=40, deadline=None)
@given(requests, st.booleans(), st.integers(1, 2))
def test_reserving_in_full_never_pauses(drawn: Drawn, cache: bool, lag: int) -> None:
    alone = [(a, (), rest, limit, lengths, abort) for a, _, rest, limit, lengths, abort in drawn]
    replay = Replay(config(0.0, cache), POOL, report_lag=lag)
    outcome = replay.run(trace(alone), max_steps=30_000)
    assert outcome.pauses == 0
    assert outcome.finished + outcome.refused == sum(len(d[4]) for d in drawn)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared", [False, True])
def test_reserving_in_full_never_pauses_a_crowd(seed: int, shared: bool) -> None:
    """Prompts longer than a step, rows that use their whole limit, a pool that is always nearly full."""
    rng = np.random.default_rng(seed)
    crowd: Drawn = []
    for _ in range(100):
        limit = int(rng.integers(1, 120))
        prefix = (1, 2) if shared and rng.random() < 0.5 else ()
        crowd.append((int(rng.integers(0, 250)), prefix, int(rng.integers(1, 200)), limit, [limit], -1))
    replay = Replay(config(0.0, rows=16), 1100 if shared else POOL, report_lag=1 + seed % 2)
    outcome = replay.run(trace(crowd), max_steps=30_000)
    assert outcome.pauses == 0 and outcome.finished == 100
    assert outcome.used_peak > 0.95


@settings(max_examples=40, deadline=None)
@given(requests, st.sampled_from([0.0, 0.5, 0.85, 1.0]))
def test_everything_ends_and_nothing_leaks_with_shared_prefixes(drawn: Drawn, ratio: float) -> None:
    replay = Replay(config(ratio), 1200)
    outcome = replay.run(trace(drawn), max_steps=30_000)
    assert outcome.finished + outcome.refused == sum(len(d[4]) for d in drawn)
    replay.router.check()
    replay.engine.check()
    assert replay.router.idle


@pytest.mark.parametrize("cache", [True, False])
def test_sharers_of_a_prefix_are_admitted_by_what_they_add(cache: bool) -> None:
    """40 requests on one prefix of 512 tokens: counted for each they would run one at a time."""
    system = np.arange(512, dtype=np.int32)
    prompts = [np.concatenate([system, np.full(20, 1000 + i, np.int32)]).astype(np.int32) for i in range(40)]
    first = Request(0, prompts[0], 30, (30,))
    others = [Request(40, p, 30, (30,)) for p in prompts[1:]]
    replay = Replay(config(0.0, cache, rows=32), 1200)
    outcome = replay.run([first, *others])
    assert outcome.pauses == 0
    assert outcome.rows >= 10 if cache else outcome.rows <= 2


def test_siblings_share_their_prompt() -> None:
    """16 siblings of a prompt of 400 tokens in a pool of 1000."""
    replay = Replay(config(0.0, rows=16), 1000)
    outcome = replay.run([Request(0, np.arange(400, dtype=np.int32), 30, (30,) * 16)])
    assert outcome.pauses == 0 and outcome.steps < 60
