"""How large steps get: time targets turned into token counts, and what is learnt from real steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.engine.batch import build_batch
from inferserve.engine.cost_model import SIZES, CostModel, StepCost, chunk_pairs, fit, padded
from inferserve.engine.pacing import LEAST_PROMPT, Pace, Target, cost_of
from inferserve.engine.planner import Budget, StepPlan, plan_step
from inferserve.engine.rows import DECODING, FILLING, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.step import Ints
from inferserve.kv.ledger import KvLedger
from inferserve.protocol.sampling import SamplingParams
from tests.unit.engine.test_cost_model import h200, some_steps

LIMITS = Budget(8448, 4096)


@pytest.fixture(scope="module")
def model() -> CostModel:
    return fit(some_steps(), [h200(s) for s in some_steps()])


def running(decoding: int, context: int, *waiting: tuple[int, int, int]) -> tuple[Rows, Ints]:
    """Rows that decode, and (state, tokens before, tokens wanted) of those that do not."""
    rows = Rows(decoding + len(waiting), 1)
    length = np.zeros(decoding + len(waiting), np.int32)
    rows.state[:decoding], length[:decoding] = DECODING, context
    rows.order[:] = np.arange(len(length))
    for row, (state, before, wanted) in enumerate(waiting, decoding):
        rows.state[row], length[row], rows.fill[row], rows.prompt_len[row] = state, before, before + wanted, wanted
    return rows, length


def decode_cost(rows: int, context: int) -> StepCost:
    return StepCost(rows, rows * (context + 1), 0.0, rows)


def test_without_a_model_budgets_are_fixed() -> None:
    rows, length = running(3, 100, (FILLING, 0, 5000))
    pace = Pace(LIMITS)
    pace.observe(decode_cost(3, 100), 5.0)
    assert pace.budget(rows, length) == LIMITS
    assert pace.factor == 1.0


def test_a_step_that_the_model_gives_for_nothing_teaches_nothing() -> None:
    of_kv = CostModel((0.0, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.0, 0.0))
    pace = Pace(LIMITS, of_kv, Target(ratio=1.35))
    pace.observe(StepCost(64, 0, 100.0, 0), 3.0)
    assert pace.factor == 1.0


def test_prompts_alone_get_all_there_is(model: CostModel) -> None:
    rows, length = running(0, 0, (FILLING, 0, 9000))
    assert Pace(LIMITS, model, Target(ratio=1.35)).budget(rows, length) == LIMITS


@pytest.mark.parametrize(("decoding", "context"), [(1, 128), (16, 1152), (64, 1152), (200, 1152), (256, 4096)])
@pytest.mark.parametrize("target", [Target(ratio=1.35, share=0), Target(ratio=2.5, share=0), Target(ms=14.0)])
def test_a_step_stays_within_its_target_and_fills_a_size(
    model: CostModel, decoding: int, context: int, target: Target
) -> None:
    rows, length = running(decoding, context, *[(QUEUED, 0, 1024)] * 20)
    prompts = Pace(LIMITS, model, target).budget(rows, length).prompts
    assert prompts is not None and prompts >= LEAST_PROMPT
    assert decoding + prompts in SIZES
    alone = model.milliseconds(decode_cost(decoding, context))
    limit = target.ms or target.ratio * alone

    def time_of(tokens: int) -> float:
        whole, rest = divmod(tokens, 1024)
        pairs = whole * chunk_pairs(0, 1024) + chunk_pairs(0, rest)
        return model.milliseconds(decode_cost(decoding, context)._replace(tokens=decoding + tokens, pairs=pairs))

    assert time_of(prompts) <= limit or padded(decoding + LEAST_PROMPT) == decoding + prompts
    assert time_of(padded(decoding + prompts + 1) - decoding) > limit


def test_every_sequence_gets_its_share_for_prompts(model: CostModel) -> None:
    """64 sequences, five tokens each: rows that wait count, so few that decode do not hold up the others."""
    pace = Pace(LIMITS, model, Target(ratio=1.0, share=5))
    busy, start = running(60, 1152, *[(QUEUED, 0, 1024)] * 4), running(4, 1152, *[(QUEUED, 0, 1024)] * 60)
    for state in (busy, start):
        prompts = pace.budget(*state).prompts
        assert prompts is not None and 4 * 64 <= prompts <= 5 * 64 + 63


def test_attention_over_a_long_context_makes_chunks_short(model: CostModel) -> None:
    pace = Pace(LIMITS, model, Target(ratio=1.35))
    prompts = [pace.budget(*running(32, 1024, (FILLING, before, 2048))).prompts for before in (0, 30_000, 120_000)]
    assert prompts == sorted(prompts, reverse=True) and prompts[0] > prompts[-1] == LEAST_PROMPT


def test_what_is_left_is_taken_whole(model: CostModel) -> None:
    pace = Pace(LIMITS, model, Target(ratio=3))
    budget = pace.budget(*running(16, 100, (FILLING, 0, 70)))
    assert budget.prompts is not None and budget.prompts >= 70
    assert pace.budget(*running(16, 100)).prompts is None


def test_paused_rows_count_with_all_they_have_to_compute(model: CostModel) -> None:
    rows, length = running(16, 100, (PAUSED, 0, 100))
    rows.out_len[16] = 200
    budget = Pace(LIMITS, model, Target(ratio=10)).budget(rows, length)
    assert budget.prompts is not None and budget.prompts >= 300


def test_guesses_are_made_while_they_cost_little(model: CostModel) -> None:
    pace = Pace(Budget(8448, 4096, drafts=4), model, Target(ratio=1.35))
    drafts = [pace.budget(*running(n, 512)).drafts for n in (1, 16, 64, 256)]
    assert drafts == sorted(drafts, reverse=True) and drafts[0] == 4 and drafts[-1] == 0


def test_real_times_move_the_factor_slowly_and_not_far(model: CostModel) -> None:
    pace = Pace(LIMITS, model, Target(ms=14.0))
    step = decode_cost(64, 1152)
    before = pace.budget(*running(64, 1152, (QUEUED, 0, 4000))).prompts
    pace.observe(step, 1e6)
    assert 1.0 < pace.factor < 1.05, "one bad step is not believed"
    for _ in range(1000):
        pace.observe(step, 1.3 * model.milliseconds(step))
    assert pace.factor == pytest.approx(1.3, rel=0.01)
    after = pace.budget(*running(64, 1152, (QUEUED, 0, 4000))).prompts
    assert before is not None and after is not None and after < before
    for _ in range(1000):
        pace.observe(step, 1e6)
    assert pace.factor == pytest.approx(2.0, rel=0.01)


def test_the_cost_of_a_batch() -> None:
    ledger, rows = KvLedger(100, 3, 50), Rows(3, 50)
    for row in range(3):
        ledger.open(row, np.arange(20, dtype=np.int32) + 20 * row)
    ledger.extend(np.arange(3, dtype=np.int32), np.array([9, 4, 6], np.int32))
    rows.prompt_len[:], rows.fill[2] = 20, 20
    decode, prefill = np.array([0, 1], np.int32), np.array([2], np.int32)
    batch = build_batch(1, StepPlan(decode, prefill, np.array([3], np.int32)), rows, ledger)
    assert cost_of(batch, 2) == StepCost(5, 10 + 5, chunk_pairs(6, 3), 2)


@settings(max_examples=100, deadline=None)
@given(
    decoding=st.integers(1, 300),
    waiting=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 5000)), max_size=8),
    ratio=st.floats(1, 4),
    limit=st.integers(300, 9000),
)
def test_prompts_never_starve_and_limits_hold(
    decoding: int, waiting: list[tuple[int, int]], ratio: float, limit: int
) -> None:
    model = CostModel((4.0, 0.004, 0.015, 0.0, 0.0, 3e-5, 1.3e-6, 1e-3))
    rows, length = running(decoding, 700, *((FILLING, before, wanted) for before, wanted in waiting))
    rules = EndRules(len(length), 1, ())
    for row in range(len(length)):
        rules.set(row, SamplingParams(max_tokens=9), 9)
    budget = Pace(Budget(limit, limit), model, Target(ratio=ratio)).budget(rows, length)
    plan = plan_step(rows, rules, length, budget, 10**6)
    tokens = len(plan.decode) + int(plan.chunks.sum())
    assert tokens <= limit and len(plan.decode) == min(decoding, limit)
    wanted = sum(w for _, w in waiting)
    assert int(plan.chunks.sum()) >= min(wanted, LEAST_PROMPT, limit - len(plan.decode))
