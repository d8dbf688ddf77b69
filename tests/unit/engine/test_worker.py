"""The worker with a backend that proves the KV right: batching, chunks, sharing, ends. Depth 0 and 1 alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inferserve.engine.step import Ints
from inferserve.errors import EngineError
from inferserve.protocol.messages import Commands, Finish, SlotRef
from inferserve.protocol.sampling import SamplingParams
from tests.fakes.engine import EOS, Rig, engine_config, expected

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, n).tolist()


@DEPTHS
def test_one_request(depth: int) -> None:
    rig = Rig(depth=depth)
    prompt = prompt_of(10)
    ref = rig.submit(prompt, max_tokens=5, seed=3)
    rig.run()
    assert rig.output(ref) == expected(prompt, 5, seed=3)
    assert rig.finish(ref) is Finish.LENGTH
    assert rig.used() == 0
    assert rig.slots.prefill_start_ns[ref.index] > 0
    assert rig.slots.first_token_ns[ref.index] <= rig.slots.last_token_ns[ref.index]
    assert np.all(rig.slots.logprobs[ref.index, :5] == -0.5)


@DEPTHS
def test_requests_join_and_leave_a_running_batch(depth: int) -> None:
    rig = Rig(depth=depth)
    refs = []
    for i in range(6):
        prompt = prompt_of(5 + 3 * i, seed=i)
        refs.append((rig.submit(prompt, max_tokens=4 + i, seed=i), prompt, 4 + i, i))
        rig.step()
    rig.run()
    for ref, prompt, count, seed in refs:
        assert rig.output(ref) == expected(prompt, count, seed)
    sizes = [b.num_decode for b in rig.backend.batches]
    assert max(sizes) > 1, "never decoded two rows together"
    assert any(b.num_decode and b.num_decode < len(b.rows) for b in rig.backend.batches), "no mixed step"


@DEPTHS
def test_chunks_of_seven_tokens_beside_decoding(depth: int) -> None:
    rig = Rig(depth=depth, chunk=7, batch=16)
    first, second = prompt_of(8, seed=1), prompt_of(30, seed=2)
    a = rig.submit(first, max_tokens=20)
    rig.step()
    rig.step()
    b = rig.submit(second, max_tokens=3)
    rig.run()
    assert rig.output(a) == expected(first, 20)
    assert rig.output(b) == expected(second, 3)
    for batch in rig.backend.batches:
        assert len(batch.token_ids) <= 16
        assert (batch.query_len <= 7).all()
    mixed = [b for b in rig.backend.batches if b.num_decode and len(b.rows) > b.num_decode]
    assert len(mixed) >= 4, "five chunks of the second prompt should run beside the first sequence"


def test_prompts_that_may_not_be_cut_run_whole() -> None:
    rig = Rig(whole_prompts=True, batch=40, max_len=48)
    prompts = [prompt_of(30, seed=i) for i in range(3)]
    refs = [rig.submit(p, max_tokens=6) for p in prompts]
    late = prompt_of(40, seed=9)
    rig.step()
    rig.step()
    refs.append(rig.submit(late, max_tokens=6))
    rig.run()
    for ref, prompt in zip(refs, [*prompts, late], strict=True):
        assert rig.output(ref) == expected(prompt, 6)
    lengths = [int(q) for b in rig.backend.batches for q in b.query_len[b.num_decode :]]
    assert sorted(lengths) == [30, 30, 30, 40]


@DEPTHS
def test_siblings_prefill_their_prompt_once(depth: int) -> None:
    rig = Rig(depth=depth)
    prompt = prompt_of(40)
    refs = [rig.fill(prompt, max_tokens=3, seed=s) for s in range(5)]
    rig.command(admit=refs[:1])
    rig.command(admit=refs[1:], leader=refs[0])
    rig.run()
    for seed, ref in enumerate(refs):
        assert rig.output(ref) == expected(prompt, 3, seed)
    prefilled = sum(int(b.query_len[b.num_decode :].sum()) for b in rig.backend.batches)
    assert prefilled == 40 + 4, "the prompt once, and its last token for each of the others"
    assert [int(rig.slots.cached_tokens[r.index]) for r in refs] == [0, 39, 39, 39, 39]


def test_siblings_do_not_wait_without_a_cache() -> None:
    rig = Rig(cache=False)
    prompt = prompt_of(12)
    refs = [rig.fill(prompt, max_tokens=3, seed=s) for s in range(3)]
    rig.command(admit=refs[:1])
    rig.command(admit=refs[1:], leader=refs[0])
    rig.run()
    assert [rig.output(r) for r in refs] == [expected(prompt, 3, s) for s in range(3)]
    assert rig.reports[-1].kv.cached == 0


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_sibling_takes_over_when_the_leader_is_aborted(when: int) -> None:
    rig = Rig(chunk=8, batch=16)
    prompt = prompt_of(40)
    refs = [rig.fill(prompt, max_tokens=3, seed=s) for s in range(4)]
    rig.command(admit=refs[:1])
    rig.command(admit=refs[1:], leader=refs[0])
    for _ in range(when):
        rig.step()
    rig.command(abort=[refs[0], refs[2]])
    rig.run()
    assert rig.finish(refs[0]) is rig.finish(refs[2]) is Finish.ABORT
    for seed in (1, 3):
        assert rig.output(refs[seed]) == expected(prompt, 3, seed)
    assert int(rig.slots.cached_tokens[refs[3].index]) == 39


def test_a_sibling_of_a_leader_that_has_ended_runs_at_once() -> None:
    rig = Rig()
    prompt = prompt_of(10)
    leader = rig.submit(prompt, max_tokens=1)
    rig.run()
    late = rig.fill(prompt, max_tokens=2, seed=5)
    rig.command(admit=[late], leader=leader)
    rig.run()
    assert rig.output(late) == expected(prompt, 2, seed=5)


@DEPTHS
def test_prefix_hits(depth: int) -> None:
    rig = Rig(depth=depth)
    prompt = prompt_of(20)
    first = rig.submit(prompt, max_tokens=8)
    rig.run()
    answer = rig.output(first)
    follow_up = [*prompt, *answer, 5, 6, 7]
    before = rig.backend.computed
    second = rig.submit(follow_up, max_tokens=4)
    rig.run()
    assert rig.output(second) == expected(follow_up, 4)
    assert rig.slots.cached_tokens[second.index] == len(prompt) + len(answer) - 1
    speculative = depth
    assert rig.backend.computed - before <= 4 + 3 + speculative


def test_a_running_prompt_is_shared_with_later_requests() -> None:
    rig = Rig()
    prompt = prompt_of(20)
    rig.submit(prompt, max_tokens=30)
    rig.step()
    second = rig.submit(prompt, max_tokens=2, seed=9)
    rig.run()
    assert rig.slots.cached_tokens[second.index] == 19


@DEPTHS
def test_eos_and_stop_tokens_end_a_row(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.backend.forced = {(1, 3): EOS, (2, 2): 77, (3, 1): EOS, (4, 1): EOS, (4, 5): EOS, (5, 1): 77}
    prompt = prompt_of(6)
    eos = rig.submit(prompt, max_tokens=10, seed=1)
    stop = rig.submit(prompt, max_tokens=10, seed=2, stop_token_ids=(76, 77))
    ignoring = rig.submit(prompt, max_tokens=10, seed=3, ignore_eos=True)
    minimum = rig.submit(prompt, max_tokens=10, seed=4, min_tokens=5)
    other = rig.submit(prompt, max_tokens=10, seed=5)
    rig.run()
    assert (len(rig.output(eos)), rig.finish(eos), rig.finished[eos].stop_token) == (4, Finish.STOP, EOS)
    assert (len(rig.output(stop)), rig.finish(stop), rig.finished[stop].stop_token) == (3, Finish.STOP, 77)
    assert (len(rig.output(ignoring)), rig.finish(ignoring)) == (10, Finish.LENGTH)
    assert (len(rig.output(minimum)), rig.finish(minimum)) == (6, Finish.STOP)
    assert (len(rig.output(other)), rig.finish(other)) == (10, Finish.LENGTH)


@DEPTHS
def test_what_was_computed_ahead_of_an_end_is_not_cached(depth: int) -> None:
    """Nobody looks at the results of that step, so its KV may be anything."""
    rig = Rig(depth=depth)
    rig.backend.forced = {(1, 3): EOS}
    rig.submit(prompt_of(6), max_tokens=10, seed=1)
    rig.run()
    assert rig.reports[-1].kv.cached == 6 + 3


@DEPTHS
def test_answers_are_not_cached_where_that_could_show(depth: int) -> None:
    config = engine_config(depth=depth)
    rig = Rig(config=replace(config, engine=replace(config.engine, deterministic=True)))
    first = rig.submit(prompt_of(20), max_tokens=8)
    rig.run()
    assert rig.reports[-1].kv.cached == 20
    follow_up = [*prompt_of(20), *rig.output(first), 5, 6, 7]
    second = rig.submit(follow_up, max_tokens=4)
    rig.run()
    assert rig.output(second) == expected(follow_up, 4)
    assert rig.slots.cached_tokens[second.index] == 20


@DEPTHS
def test_siblings_of_a_leader_that_ends_with_its_prompt_run_together(depth: int) -> None:
    rig = Rig(depth=depth)
    refs = [rig.fill(prompt_of(6), max_tokens=1, seed=s) for s in range(4)]
    rig.command(admit=refs[:1])
    rig.command(admit=refs[1:], leader=refs[0])
    rig.run()
    assert [len(b.rows) for b in rig.backend.batches] == [1, 3]


@DEPTHS
def test_the_context_limit_ends_a_row(depth: int) -> None:
    rig = Rig(depth=depth, max_len=24)
    prompt = prompt_of(20)
    ref = rig.submit(prompt, max_tokens=100)
    rig.run()
    assert rig.output(ref) == expected(prompt, 4)
    assert rig.finish(ref) is Finish.LENGTH


@DEPTHS
def test_a_row_with_nan_fails_alone_and_is_not_cached(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.backend.failing = {(1, 0), (2, 3)}
    prompt = prompt_of(30, seed=8)
    shared = rig.submit(prompt, max_tokens=6, seed=7)
    rig.step()
    refs = [rig.submit([*prompt_of(12, seed=s)], max_tokens=6, seed=s) for s in (1, 2, 3)]
    rig.run()
    assert [rig.finish(r) for r in refs] == [Finish.ERROR, Finish.ERROR, Finish.LENGTH]
    assert "not finite" in rig.finished[refs[0]].error
    assert [len(rig.output(r)) for r in refs] == [0, 3, 6]
    assert rig.output(refs[2]) == expected(prompt_of(12, seed=3), 6, seed=3)
    assert rig.output(shared) == expected(prompt, 6, seed=7)
    rig.backend.failing = set()
    again = rig.submit(prompt_of(12, seed=1), max_tokens=2, seed=1)
    rig.run()
    assert rig.slots.cached_tokens[again.index] == 0, "the failed row's KV was cached"
    longer = rig.submit([*prompt_of(12, seed=2), *rig.output(refs[1]), 1], max_tokens=2, seed=2)
    rig.run()
    assert rig.slots.cached_tokens[longer.index] == 12, "only the prompt, shared before the row failed, may be cached"


@DEPTHS
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_time_gives_everything_back(depth: int, steps: int) -> None:
    rig = Rig(depth=depth, chunk=7, batch=12)
    mate_prompt = prompt_of(9, seed=5)
    mate = rig.submit(mate_prompt, max_tokens=15)
    ref = rig.submit(prompt_of(25), max_tokens=8, seed=2)
    for _ in range(steps):
        rig.step()
    done = ref in rig.finished
    rig.command(abort=[ref])
    rig.step()
    rig.step()
    assert ref in rig.finished
    assert rig.finish(ref) is (Finish.LENGTH if done else Finish.ABORT)
    rig.run()
    assert rig.output(mate) == expected(mate_prompt, 15)
    assert rig.used() == 0
    visible = rig.output(ref)
    assert visible == expected(prompt_of(25), len(visible), seed=2)


@DEPTHS
def test_a_stop_string_ends_a_row_with_stop(depth: int) -> None:
    rig = Rig(depth=depth)
    ref = rig.submit(prompt_of(5), max_tokens=50)
    for _ in range(4):
        rig.step()
    rig.command(stop=[ref])
    rig.run()
    assert rig.finish(ref) is Finish.STOP
    assert rig.finished[ref].stop_token == -1
    assert 0 < len(rig.output(ref)) < 50


def test_stale_and_repeated_commands_do_nothing() -> None:
    rig = Rig()
    ref = rig.submit(prompt_of(5), max_tokens=3)
    rig.command(abort=[SlotRef(ref.index, ref.generation + 1)], stop=[SlotRef(5, 1), SlotRef(10**6, 1)])
    rig.command(admit=[SlotRef(ref.index, ref.generation - 1), SlotRef(10**6, 1), SlotRef(-1, 1)])
    rig.run()
    assert rig.output(ref) == expected(prompt_of(5), 3)
    rig.command(abort=[ref], stop=[ref])
    rig.step()
    assert rig.finish(ref) is Finish.LENGTH


def test_a_cancelled_slot_never_runs() -> None:
    rig = Rig()
    ref = rig.fill(prompt_of(5), max_tokens=3)
    rig.http.cancelled[ref.index] = 1
    rig.command(admit=[ref])
    rig.run()
    assert rig.finish(ref) is Finish.ABORT
    assert rig.output(ref) == []
    assert rig.backend.computed == 0


def test_columns_of_the_slot_before_are_reset() -> None:
    rig = Rig(queued=0, rows=1)
    first = rig.submit(prompt_of(5), max_tokens=9)
    rig.run()
    second = rig.fill(prompt_of(6), max_tokens=2)
    assert second.index == first.index
    rig.command(admit=[second])
    assert rig.slots.visible[second.index] == rig.slots.finish[second.index] == 0
    rig.run()
    assert rig.output(second) == expected(prompt_of(6), 2)


def test_parameters_that_do_not_decode_end_that_request() -> None:
    rig = Rig()
    bad = rig.fill(prompt_of(5), max_tokens=3)
    rig.http.params[bad.index, :4] = 0xFF
    empty = rig.fill([], max_tokens=3)
    good = rig.fill(prompt_of(5), max_tokens=3)
    rig.command(admit=[bad, empty, good])
    rig.run()
    assert rig.finish(bad) is rig.finish(empty) is Finish.ERROR
    assert rig.finish(good) is Finish.LENGTH


def test_a_row_that_the_backend_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    take = rig.backend.open_row

    def refuse(row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        if params.seed == 13:
            raise ValueError("bias for a token that is not there")
        take(row, params, prompt, output)

    monkeypatch.setattr(rig.backend, "open_row", refuse)
    good = rig.submit(prompt_of(5), max_tokens=3)
    bad = rig.submit(prompt_of(6), max_tokens=3, seed=13)
    rig.run()
    assert rig.finish(bad) is Finish.ERROR
    assert "not there" in rig.finished[bad].error
    assert rig.output(good) == expected(prompt_of(5), 3)
    assert rig.used() == 0


def test_a_gap_in_commands_ends_the_engine() -> None:
    rig = Rig()
    rig.command()
    with pytest.raises(EngineError, match="commands 5 came after 0"):
        rig.worker.apply(Commands(5))


def test_more_rows_than_fit_is_an_engine_error() -> None:
    rig = Rig(rows=2)
    rig.submit(prompt_of(5))
    rig.submit(prompt_of(5))
    with pytest.raises(EngineError, match="more than 2"):
        rig.submit(prompt_of(5))


def test_alternatives_travel_when_asked_for() -> None:
    rig = Rig()
    plain = rig.submit(prompt_of(5), max_tokens=3)
    asking = rig.submit(prompt_of(5), max_tokens=3, logprobs=2)
    rig.run()
    tops = [top for report in rig.reports for top in report.tops]
    assert [t.position for t in tops] == [0, 1, 2]
    assert {(t.index, t.generation) for t in tops} == {(asking.index, asking.generation)}
    assert [t.token_ids[0] for t in tops] == rig.output(asking) == rig.output(plain)


def test_reports_count_tokens_and_tell_only_what_changed() -> None:
    rig = Rig()
    rig.submit(prompt_of(10), max_tokens=4)
    rig.run()
    assert sum(r.prefill_tokens for r in rig.reports) == 10
    assert sum(r.decode_tokens for r in rig.reports) == 3
    assert rig.reports[-1].kv.running == 0
    assert rig.step() is None, "nothing has changed"


@DEPTHS
def test_a_row_that_ends_by_its_limit_is_not_computed_further(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit(prompt_of(10), max_tokens=4)
    rig.run()
    assert rig.backend.computed == 10 + 3


def test_the_pipeline_runs_one_step_ahead() -> None:
    rig = Rig(depth=1)
    ref = rig.submit(prompt_of(10), max_tokens=4)
    rig.step()
    assert rig.output(ref) == []
    rig.step()
    assert len(rig.output(ref)) == 1
    assert rig.backend.batches[1].token_ids.tolist() == [-1], "the id should be taken from the device"


def test_rows_whose_prompt_has_not_begun_are_told_apart() -> None:
    rig = Rig(batch=16, chunk=16)
    refs = [rig.submit(prompt_of(16, seed=i), max_tokens=30) for i in range(4)]
    rig.step()
    rig.step()
    assert [(report.kv.running, report.kv.queued) for report in rig.reports] == [(1, 3), (2, 2)]
    assert [bool(rig.slots.prefill_start_ns[ref.index]) for ref in refs] == [True, True, False, False]
