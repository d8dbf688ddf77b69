"""Warm-up steps reach the largest sizes, within the places they are given, and keep the rules of real steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from inferserve.config.schema import EnginePart, ModelPart, SchedulePart, ServerConfig
from inferserve.engine import warmup
from inferserve.engine.step import Ints, PendingStep, StepBatch, StepResult
from inferserve.engine.warmup import Extent
from inferserve.protocol.sampling import SamplingParams

NOTHING = StepResult(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), {})


@dataclass
class Recorder:
    """A backend that keeps the steps and checks that their rows are open."""

    steps: list[StepBatch] = field(default_factory=list)
    params: list[list[SamplingParams]] = field(default_factory=list)
    rows: dict[int, tuple[SamplingParams, int]] = field(default_factory=dict)

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        self.rows[row] = (params, len(prompt) + len(output))

    def close_row(self, row: int) -> None:
        del self.rows[row]

    def launch(self, batch: StepBatch) -> PendingStep:
        self.steps.append(batch)
        self.params.append([self.rows[row][0] for row in batch.rows.tolist()])
        for row in batch.rows.tolist():
            self.rows[row] = (self.rows[row][0], self.rows[row][1] + 1)
        return self

    def result(self) -> StepResult:
        return NOTHING

    def start(self) -> Any:
        raise NotImplementedError


def run(extent: Extent) -> Recorder:
    recorder = Recorder()
    table = np.zeros((extent.rows, extent.length), np.int32)
    assert list(warmup.phases(recorder, table, extent)) == ["one row", "sampling", "largest steps"]
    assert not recorder.rows
    return recorder


EXTENTS = [
    Extent(rows=256, length=16384, tokens=8448, chunk=4096),
    Extent(rows=8, length=100, tokens=1000, chunk=60),
    Extent(rows=1, length=50, tokens=50, chunk=50),
    Extent(rows=4, length=16, tokens=20, chunk=16),
    Extent(rows=64, length=30, tokens=16, chunk=8),
    Extent(rows=3, length=2, tokens=1, chunk=1),
]


@pytest.mark.parametrize("extent", EXTENTS, ids=str)
def test_steps_are_as_large_as_may_be_and_no_larger(extent: Extent) -> None:
    steps = run(extent).steps
    for step in steps:
        queries = step.query_len
        assert len(step.rows) <= extent.rows and queries.sum() == len(step.token_ids) <= extent.tokens
        assert queries.max() <= extent.chunk and (queries[: step.num_decode] == 1).all()
        assert len(set(step.kv_index.tolist())) == len(step.kv_index)
        assert step.kv_index.min() >= 0 and step.kv_index.max() < extent.places
        assert (step.positions < np.repeat(step.kv_len, queries)).all() and step.kv_len.max() <= extent.length
    most = min(extent.tokens, extent.rows * extent.chunk)
    assert max(len(step.token_ids) for step in steps) == most
    longest = [step for step in steps if step.kv_len.max() >= extent.length and step.num_decode == len(step.rows)]
    assert max(len(step.rows) for step in longest) == min(extent.rows, extent.tokens)


@pytest.mark.parametrize("extent", EXTENTS, ids=str)
def test_one_chunk_has_a_prefix_even_where_prompts_are_not_cut(extent: Extent) -> None:
    alone = [step for step in run(extent).steps if len(step.rows) == 1 and not step.num_decode]
    first, behind = alone[0], alone[1]
    assert first.kv_len[0] == first.query_len[0] == extent.chunk
    assert behind.kv_len[0] == extent.length
    assert behind.new_prefix == (((0, before),) if (before := extent.length - int(behind.query_len[0])) else ())
    assert before >= extent.length // 3


def test_a_step_with_prompts_of_several_rows() -> None:
    (mixed,) = (step for step in run(EXTENTS[0]).steps if 0 < step.num_decode < len(step.rows))
    assert (mixed.num_decode, mixed.query_len[mixed.num_decode :].tolist()) == (253, [2732, 2732, 2731])
    assert mixed.kv_len[mixed.num_decode :].tolist() == [16384, 2732, 2731], "one ends the longest context"
    assert mixed.new_prefix[253:] == ((253, 16384 - 2732),)
    assert mixed.table[253, : 16384 - 2732].max() < 16384 - 1 <= mixed.kv_index.min(), "its prefix is nobody's own"


def test_every_kind_of_sampling_is_done_and_the_largest_steps_do_everything() -> None:
    recorder = run(EXTENTS[0])
    kinds = {params.greedy for row in recorder.params for params in row}
    assert kinds == {True, False}
    assert any(len({p.greedy for p in row}) == 2 for row in recorder.params)
    for params in recorder.params[-2:]:
        assert {(p.logprobs, p.repetition_penalty > 1, p.greedy) for p in params} == {(20, True, False)}


def config(**schedule: Any) -> ServerConfig:
    return ServerConfig(model=ModelPart(max_req_total_len=4096), engine=EnginePart(), schedule=SchedulePart(**schedule))


def test_largest() -> None:
    flags = {"batch_max_tokens": 8448, "chunked_prefill_size": 4096}
    assert warmup.largest(config(**flags), 256) == Extent(256, 4096, 8448, 4096)
    assert warmup.largest(config(batch_max_tokens=512, chunked_prefill_size=600), 9) == Extent(9, 4096, 512, 512)
    whole = config(batch_max_tokens=512, chunked_prefill_size=4096, disable_chunked_prefill=True)
    assert warmup.largest(whole, 9) == Extent(9, 4096, 4096, 4096)
