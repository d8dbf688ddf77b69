"""The fake backend: tokens are a function of seed, prompt and position alone; steps take their time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inferserve.config.schema import EnginePart, ServerConfig
from inferserve.engine.fake import FakeBackend, printable_ids
from inferserve.engine.worker import Worker
from inferserve.protocol.messages import Finish
from inferserve.tokenize.load import load_tokenizer
from tests.fakes import tiny_tokenizers
from tests.fakes.engine import Rig, engine_config

VOCABULARY = np.arange(5, 95, dtype=np.int32)


def rig_of(**settings: object) -> Rig:
    """A rig whose worker runs the fake backend."""
    rig = Rig(**settings)  # type: ignore[arg-type]
    rows = rig.config.schedule.running_max_req_size
    rig.worker = Worker(rig.config, rig.slots, FakeBackend(rig.config, rows, VOCABULARY), 200)
    return rig


def text(rig: Rig, prompt: list[int], seed: int) -> list[int]:
    ref = rig.submit(prompt, max_tokens=20, seed=seed)
    rig.run()
    assert rig.finish(ref) is Finish.LENGTH
    return rig.output(ref)


def test_tokens_depend_on_seed_and_prompt_and_nothing_else() -> None:
    prompt = [1, 2, 3, 4]
    alone = text(rig_of(), prompt, seed=1)
    assert len(set(alone)) > 5 and set(alone) <= set(VOCABULARY.tolist())
    assert text(rig_of(), prompt, seed=2) != alone
    assert text(rig_of(), [1, 2, 3, 5], seed=1) != alone
    for depth in (0, 1):
        rig = rig_of(depth=depth, chunk=3, batch=16)
        refs = [rig.submit(prompt if i == 3 else [9, i], max_tokens=20, seed=1) for i in range(8)]
        rig.run()
        assert rig.output(refs[3]) == alone


def test_pauses_do_not_change_the_text() -> None:
    rig = rig_of()
    rig.worker = Worker(rig.config, rig.slots, FakeBackend(rig.config, 8, VOCABULARY), 40)
    refs = [rig.submit([1, 2, i], max_tokens=20, seed=i) for i in range(5)]
    rig.run()
    assert sum(r.preempted for r in rig.reports) > 0
    for i, ref in enumerate(refs):
        assert rig.output(ref) == text(rig_of(), [1, 2, i], seed=i)


def test_logprobs_only_for_those_who_ask() -> None:
    rig = rig_of()
    plain = rig.submit([1], max_tokens=3)
    chosen = rig.submit([1], max_tokens=3, logprobs=0)
    top = rig.submit([1], max_tokens=3, logprobs=3)
    rig.run()
    assert np.isnan(rig.slots.logprobs[plain.index, :3]).all()
    for ref in (chosen, top):
        assert (rig.slots.logprobs[ref.index, :3] <= 0).all()
    tops = [t for r in rig.reports for t in r.tops]
    assert {t.index for t in tops} == {top.index}
    for position, item in enumerate(tops):
        assert item.token_ids[0] == rig.output(top)[position]
        assert item.logprobs[0] == pytest.approx(rig.slots.logprobs[top.index, position])
        assert len(item.token_ids) == 3 and sorted(item.logprobs, reverse=True) == list(item.logprobs)


@pytest.mark.parametrize(("depth", "steps_in_time"), [(0, 4), (1, 4)])
def test_steps_take_their_time_on_a_device_of_their_own(depth: int, steps_in_time: int) -> None:
    """Time is a fake clock: results wait for the end of their step, launches do not."""
    now = [100.0]
    config = replace(engine_config(depth=depth), engine=EnginePart(fake_step_ms=10.0, pipeline_depth=depth))
    backend = FakeBackend(config, 8, VOCABULARY, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    rig = Rig(config=config)
    rig.worker = Worker(config, rig.slots, backend, 200)
    ref = rig.submit([1, 2, 3], max_tokens=4)
    rig.run()
    assert len(rig.output(ref)) == 4
    assert now[0] == pytest.approx(100.0 + 0.010 * steps_in_time)


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.sentencepiece])
def test_printable_ids_are_text_by_themselves(make: object, tmp_path: Path) -> None:
    folder = make(tmp_path / "tokenizer")  # type: ignore[operator]
    base = engine_config()
    config = ServerConfig(engine=base.engine, facts=replace(base.facts, folder=str(folder), vocab_size=10**6))
    tokenizer = load_tokenizer(config)
    ids = printable_ids(tokenizer, config.facts.vocab_size)
    assert len(ids) > 20
    assert not set(ids.tolist()) & (tokenizer.special_ids | set(tokenizer.eos_ids))
    assert all(tokenizer.token_bytes(i).decode().isprintable() for i in ids.tolist())
    assert printable_ids(tokenizer, int(ids[10])).tolist() == ids[:10].tolist()
    backend = FakeBackend(config, 2)
    assert backend.start().kv_tokens == 1 << 20


def test_an_output_with_a_period_repeats_itself() -> None:
    config = engine_config()
    rig = rig_of(config=replace(config, engine=replace(config.engine, fake_period=3)))
    output = text(rig, [1, 2, 3], seed=1)
    assert output == (output[:3] * 7)[:20] and len(set(output[:3])) > 1
    assert output[:3] == text(rig_of(), [1, 2, 3], seed=1)[:3]
