"""Guessed tokens: what is proposed, and that checking guesses changes nothing that anybody can see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.engine.proposer import NgramProposer
from inferserve.protocol.messages import Finish
from inferserve.protocol.sampling import SamplingParams
from tests.fakes.engine import EOS, Rig, expected
from tests.unit.engine.test_pressure import WorkerMachine

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
FEW = 3


def propose(known: list[int], most: int = 4, sure: bool = False) -> list[int]:
    return NgramProposer().propose(np.array(known, np.int32), most, sure).tolist()


# ------------------------------------------------------------------------------------------------------ proposals


def test_the_longest_match_counts_then_the_newest() -> None:
    assert propose([1, 2, 3, 9, 8, 7, 3, 5, 5, 1, 2, 3], 2) == [9, 8], "three equal tokens against one"
    assert propose([2, 3, 7, 2, 3, 8, 4, 2, 3], 2) == [8, 4], "of two equal matches the newer"
    assert propose([3, 1, 3, 2, 5, 3], 1) == [2]


def test_nothing_new_under_the_sun_is_needed() -> None:
    assert propose([7]) == propose([1, 2, 3]) == []


def test_a_good_guess_follows_three_equal_tokens() -> None:
    assert propose([1, 2, 9, 1, 2], sure=True) == []
    assert propose([1, 2, 3, 9, 1, 2, 3], 1, sure=True) == [9]


def test_a_repeating_text_is_continued_beyond_its_end() -> None:
    assert propose([5, 5, 5], 4) == [5, 5, 5, 5]
    assert propose([1, 2, 3, 1, 2, 3, 1], 5) == [2, 3, 1, 2, 3]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_a_guess_is_what_followed_the_longest_earlier_match(known: list[int], most: int, sure: bool) -> None:
    def equal(end: int) -> int:
        n = 0
        while n < 3 and n <= end and known[end - n] == known[-1 - n]:
            n += 1
        return n

    best = max(((equal(end), end) for end in range(len(known) - 1)), default=(0, 0))
    guess = propose(known, most, sure)
    if best[0] < (3 if sure else 1):
        assert guess == []
        return
    text = list(known)
    for i in range(most):
        text.append(text[best[1] + 1 + i])
    assert guess == text[len(known) :]


# ---------------------------------------------------------------------------------------------------- same outcome


def rig_of(depth: int, **settings: object) -> Rig:
    return Rig(depth=depth, drafts=4, alphabet=FEW, **settings)  # type: ignore[arg-type]


def prompt_of(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, FEW, n).tolist()


def accepted(rig: Rig) -> int:
    return sum(sum(r.accepted) for r in rig.reports)


@DEPTHS
@pytest.mark.parametrize("cache", [True, False])
def test_the_text_is_the_same_in_fewer_steps(depth: int, cache: bool) -> None:
    rig = rig_of(depth, cache=cache, chunk=7, batch=40)
    prompts = [prompt_of(5 + 4 * i, seed=i) for i in range(6)]
    refs = [rig.submit(p, max_tokens=15 + i, seed=i, temperature=0.0) for i, p in enumerate(prompts)]
    rig.run()
    for i, (ref, prompt) in enumerate(zip(refs, prompts, strict=True)):
        assert rig.output(ref) == expected(prompt, 15 + i, i, FEW)
        assert rig.finish(ref) is Finish.LENGTH
    drafted = sum(r.draft_tokens for r in rig.reports)
    assert 0 < accepted(rig) < drafted
    assert sum(r.drafts for r in rig.reports) <= drafted <= 4 * sum(r.drafts for r in rig.reports)
    tokens = sum(15 + i for i in range(6))
    assert sum(r.decode_tokens for r in rig.reports) == tokens - 6 - accepted(rig) + drafted
    assert sum(r.prefill_tokens for r in rig.reports) + sum(rig.slots.cached_tokens[r.index] for r in refs) == sum(
        map(len, prompts)
    )
    assert rig.used() == 0


@DEPTHS
def test_one_step_takes_a_whole_draft(depth: int) -> None:
    rig = Rig(depth=depth, drafts=4, alphabet=1)
    ref = rig.submit([0, 0, 0, 0], max_tokens=11, temperature=0.0)
    rig.run()
    assert rig.output(ref) == [0] * 11
    lengths = [int(b.query_len[0]) for b in rig.backend.batches]
    assert lengths == [4, 5, 5], "the prompt and one token, then two drafts of four and one token each"
    assert [r.accepted for r in rig.reports if r.drafts] == [(1, 1, 1, 1)] * 2


@DEPTHS
def test_the_last_guess_does_not_pass_the_limit(depth: int) -> None:
    rig = Rig(depth=depth, drafts=4, alphabet=1)
    refs = [rig.submit([0] * 5, max_tokens=n, temperature=0.0) for n in (1, 2, 3, 4)]
    rig.run()
    assert [len(rig.output(r)) for r in refs] == [1, 2, 3, 4]
    full = rig.submit([0] * 58, max_tokens=100, temperature=0.0)
    rig.run()
    assert len(rig.output(full)) == 64 - 58, "as long as a sequence may be"


@DEPTHS
@pytest.mark.parametrize("at", range(1, 9))
def test_stop_tokens_and_faults_inside_a_draft(depth: int, at: int) -> None:
    """Position `at` lies at every place of a draft once. What comes after is not shown, counted or cached."""
    rig = Rig(depth=depth, drafts=4, alphabet=1)
    rig.backend.forced = {(1, at): EOS}
    rig.backend.failing = {(2, at)}
    eos = rig.submit([0] * 4, max_tokens=20, seed=1, temperature=0.0)
    bad = rig.submit([0] * 5, max_tokens=20, seed=2, temperature=0.0)
    stop = rig.submit([0] * 6, max_tokens=20, seed=3, temperature=0.0, stop_token_ids=(0,))
    least = rig.submit([0] * 7, max_tokens=20, seed=4, temperature=0.0, stop_token_ids=(0,), min_tokens=at)
    rig.run()
    assert rig.output(eos) == [0] * at + [EOS]
    assert (rig.finish(eos), rig.finished[eos].stop_token) == (Finish.STOP, EOS)
    assert rig.output(bad) == [0] * at
    assert rig.finish(bad) is Finish.ERROR
    assert rig.output(stop) == [0]
    assert rig.output(least) == [0] * (at + 1)
    assert rig.used() == 0


@DEPTHS
def test_who_asks_for_more_than_the_likeliest_token_is_computed_as_usual(depth: int) -> None:
    rig = Rig(depth=depth, drafts=4, alphabet=1, rows=12)
    others: list[dict[str, object]] = [
        {"temperature": 0.5},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "presence_penalty": 0.1},
        {"temperature": 0.0, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"temperature": 0.0, "min_tokens": 9},
    ]
    assert not any(SamplingParams(**o).plain for o in others[:-1])  # type: ignore[arg-type]
    refs = [rig.submit([0] * 5, max_tokens=9, **o) for o in others]
    rig.run()
    assert all(len(rig.output(r)) == 9 for r in refs)
    assert not any(r.drafts for r in rig.reports)
    quick = rig.submit([0] * 5, max_tokens=9, temperature=0.0)
    slow = rig.submit([0] * 5, max_tokens=9, temperature=0.5)
    rig.run()
    assert rig.output(quick) == rig.output(slow) == [0] * 9
    assert list(rig.finished)[-2:] == [quick, slow]


def test_drafts_leave_room_for_prompts() -> None:
    """Of what decode rows leave of a step, prompts get half."""
    rig = Rig(drafts=4, alphabet=1, batch=16, chunk=16)
    first = [rig.submit([0] * 6, max_tokens=50, temperature=0.0, seed=s) for s in range(4)]
    rig.step()
    while not all(rig.output(r) for r in first):
        rig.step()
    late = rig.submit([1] + [0] * 29, max_tokens=2, temperature=0.0)
    while not rig.output(late):
        rig.step()
        assert len(rig.backend.batches[-1].token_ids) <= 16
    beside = [int(b.query_len[-1]) for b in rig.backend.batches if len(b.rows) > 4]
    assert min(beside) >= 6


@DEPTHS
@pytest.mark.parametrize("kv", [40, 64, 100])
def test_pauses_and_drafts(depth: int, kv: int) -> None:
    rig = rig_of(depth, kv=kv, chunk=7, batch=20)
    prompts = [prompt_of(6 + 2 * i, seed=i) for i in range(6)]
    refs = [rig.submit(p, max_tokens=20, seed=i, temperature=0.0) for i, p in enumerate(prompts)]
    rig.run()
    for i, (ref, prompt) in enumerate(zip(refs, prompts, strict=True)):
        assert rig.output(ref) == expected(prompt, 20, i, FEW)
    assert accepted(rig) > 0
    assert sum(r.preempted for r in rig.reports) > 0
    assert rig.used() == 0


class DraftingMachine(WorkerMachine):
    """All that a router may do, with guesses that come true one time in three."""

    drafts = 4
    alphabet = FEW
    params = (("temperature", 0.0),)


class PipelinedDrafting(DraftingMachine):
    depth = 1


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = SETTINGS
TestPipelinedDrafting = PipelinedDrafting.TestCase
TestPipelinedDrafting.settings = SETTINGS
