"""Captured steps: one recording of a model's launches for each bucket of tokens, replayed for every step that fits.

A recording covers ids and page table, embedding, layers and the last norm, for all tokens of the bucket; the head runs
after it on the tokens that sample, as sampling does. Decode buckets hold nothing but decode rows, the others any mix of
rows. What a step consists of reaches the launches through `StaticInputs` and the attention's work list.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inferserve.attention.base import Bucket, CapturableAttention, HostRows
from inferserve.config.schema import EnginePart
from inferserve.engine import static_inputs
from inferserve.engine.cost_model import SIZES
from inferserve.engine.recorder import Recorder, Run
from inferserve.engine.staging import DeviceRows
from inferserve.engine.static_inputs import StaticInputs, Upload
from inferserve.engine.step import StepBatch
from inferserve.kernels.dispatch import Kernels
from inferserve.layers.context import ForwardContext
from inferserve.log import event
from inferserve.models.spec import CapturableModel

log = logging.getLogger(__name__)

_FEW = (16, 32)
"""Tokens of mixed buckets below those that the planner fills: a few rows check drafts, or finish short prompts."""
_PROGRESS_EVERY_S = 1.0
_PROBES = 4
_NO_ROWS = HostRows(np.empty(0, np.int32), 0, np.empty(0, np.int32), np.empty(0, np.int32))


def buckets(engine: EnginePart, max_rows: int, max_tokens: int) -> tuple[Bucket, ...]:
    """What to capture, largest first.

    Args:
        max_rows: sequences that run at once.
        max_tokens: tokens of the largest step.
    """
    if engine.disable_cudagraph:
        return ()
    most = min(engine.graph_max_batch_size, max_rows, max_tokens)
    every, grow = engine.graph_split_batch_size, engine.graph_grow_step_size
    decode = {*range(1, min(every, most) + 1), *range((every // grow + 1) * grow, most, grow), most}
    limit = engine.prefill_cudagraph_max_handle_token
    mixed = [tokens for tokens in (*_FEW, *SIZES) if tokens <= limit and tokens < max_tokens]
    if max_tokens <= limit:
        mixed.append(max_tokens)
    found = [Bucket(n, n, 0) for n in decode] + [Bucket(n, min(n, max_rows), min(n, max_rows)) for n in mixed]
    return tuple(sorted(found, reverse=True))


@dataclass(frozen=True)
class CapturedStep:
    """One bucket: where its inputs go, and what replays it."""

    inputs: StaticInputs
    replay: Run

    @property
    def bucket(self) -> Bucket:
        """Its size."""
        return self.inputs.bucket


@dataclass(frozen=True)
class Parts:
    """What captured steps are made of.

    Attributes:
        spare: pool token that padding writes to.
    """

    model: CapturableModel
    attention: CapturableAttention
    kernels: Kernels
    rows: DeviceRows
    spare: int


class Graphs:
    """The captured steps of a runner, in any order."""

    def __init__(self, parts: Parts, steps: Iterable[CapturedStep]) -> None:
        ordered = sorted(steps, key=lambda step: step.bucket)
        self._parts = parts
        self._decode = [step for step in ordered if not step.bucket.chunks]
        self._mixed = [step for step in ordered if step.bucket.chunks]
        self._decode_sizes = [step.bucket.tokens for step in self._decode]
        self._mixed_sizes = [step.bucket.tokens for step in self._mixed]

    def __len__(self) -> int:
        return len(self._decode) + len(self._mixed)

    def find(self, batch: StepBatch) -> CapturedStep | None:
        """The smallest one that serves the step, or None."""
        tokens = len(batch.token_ids)
        if len(batch.rows) == batch.num_decode and (at := bisect_left(self._decode_sizes, tokens)) < len(self._decode):
            return self._decode[at]
        at = bisect_left(self._mixed_sizes, tokens)
        return self._mixed[at] if at < len(self._mixed) else None

    def launch(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [S, vocab] of the step and the rows int64 [S] that they belong to; None if no graph serves it.

        The rows lie in the step's inputs: they hold until the next launch, and for what is queued before it.
        """
        step = self.find(batch)
        if step is None:
            return None
        parts, samples = self._parts, len(batch.sample)
        parts.rows.enter_prefixes(batch)
        host = HostRows(batch.rows, batch.num_decode, batch.query_len, batch.kv_len)
        step.inputs.fill(batch, parts.attention.work(host, step.bucket))
        hidden, sections = step.replay(), step.inputs.device
        if samples == len(batch.token_ids):
            hidden = hidden[:samples]
        else:
            hidden = hidden.index_select(0, sections.picked[:samples])
        return parts.model.logits(hidden), sections.sampling[:samples]


def capture(parts: Parts, wanted: Sequence[Bucket], recorder: Recorder, what: str = "capturing graphs") -> Graphs:
    """Record the buckets in the order given (largest first: they share memory), with lines of progress."""
    work = [parts.attention.work_size(bucket) for bucket in wanted]
    room = max(static_inputs.size(bucket, size) for bucket, size in zip(wanted, work, strict=True))
    upload = Upload(room, parts.rows.table.device)
    steps: list[CapturedStep] = []
    started = shown = time.monotonic()
    for bucket, size in zip(wanted, work, strict=True):
        steps.append(record(parts, StaticInputs(bucket, size, upload, parts.rows, parts.spare), recorder))
        now = time.monotonic()
        if now - shown > _PROGRESS_EVERY_S or len(steps) == len(wanted):
            shown = now
            event(log, what, done=len(steps), of=len(wanted), seconds=round(now - started, 1))
    return Graphs(parts, steps)


def measure(parts: Parts, wanted: Sequence[Bucket], recorder: Recorder) -> int:
    """Bytes of device memory that `capture` will take, from a few of the buckets.

    The largest of each kind pay for the shared memory, others for their nodes and results alone; what some in the middle
    take is what each is taken to take, and a quarter more.
    """
    chief = [next(b for b in wanted if bool(b.chunks) is mixed) for mixed in {bool(b.chunks) for b in wanted}]
    rest = [bucket for bucket in wanted if bucket not in chief]
    some = rest[len(rest) // 3 :][:_PROBES]

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    before = free()
    first = capture(parts, sorted(chief, reverse=True), recorder, "measuring graphs")
    between = free()
    second = capture(parts, some, recorder, "measuring graphs") if some else None
    after = free()
    del first, second
    return before - between + (between - after) * len(rest) * 5 // (4 * max(1, len(some)))


def record(parts: Parts, inputs: StaticInputs, recorder: Recorder) -> CapturedStep:
    """Record the bucket of `inputs` over a step of nothing but padding."""
    batch, sections, rows = inputs.attention_batch(parts.rows.table), inputs.device, parts.rows
    inputs.fill(_EMPTY, parts.attention.work(_NO_ROWS, inputs.bucket))

    def run() -> torch.Tensor:
        token_ids = parts.kernels.step_inputs(
            sections.token_ids, sections.owners, sections.positions, sections.kv_index, rows.last_token, rows.table
        )
        plan = parts.attention.plan(batch)
        context = ForwardContext(batch, parts.attention, plan, parts.kernels, sections.picked)
        return parts.model.hidden(token_ids, context)

    step = CapturedStep(inputs, recorder.record(run))
    hidden = step.replay()  # the first replay of a graph takes longer than others
    if not inputs.bucket.chunks:
        # The head's product is not captured: this loads its kernels for each number of rows.
        parts.model.logits(hidden)
    return step


def _nothing() -> StepBatch:
    none = np.empty(0, np.int32)
    table = np.empty((0, 0), np.int32)
    return StepBatch(0, none, 0, none, none, none, none, none, table, (), none, none)


_EMPTY = _nothing()
