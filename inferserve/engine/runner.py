"""`Runner`: one step = stage, forward, sample, hand back. Knows the model only as logits of a step.

On CUDA `launch` returns while the device works; results travel to pinned memory behind the step and an event says
when they are there. Nothing in `launch` waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inferserve.attention.base import AttentionBackend, CapturableAttention, HostRows
from inferserve.engine.graphs import Graphs
from inferserve.engine.shared_sampling import TokenChooser
from inferserve.engine.staging import Staging
from inferserve.engine.step import PendingStep, StepBatch, StepResult, TopAlternatives
from inferserve.kernels.dispatch import Kernels
from inferserve.layers.context import ForwardContext
from inferserve.models.spec import CausalModel
from inferserve.sampling.sampler import Tops


@dataclass(frozen=True)
class Done:
    """A step whose results are on the host."""

    value: StepResult

    def result(self) -> StepResult:
        """See PendingStep."""
        return self.value


@dataclass(frozen=True)
class InFlight:
    """A step on the device; the tensors are filled when `event` has happened.

    Attributes:
        chosen: int32 [3, S] in pinned memory: token ids, the bits of their logprobs, failures.
        tops: its tensors in pinned memory.
    """

    chosen: torch.Tensor
    tops: Tops | None
    event: torch.cuda.Event

    def result(self) -> StepResult:
        """See PendingStep."""
        self.event.synchronize()
        return _result(self.chosen, self.tops)


@dataclass(frozen=True)
class Runner:
    """The parts of a step on one device.

    Attributes:
        lists: `attention`, if it works from lists made on the host.
        graphs: captured steps; what they do not serve is launched piece by piece.
    """

    model: CausalModel
    attention: AttentionBackend
    kernels: Kernels
    sampler: TokenChooser
    staging: Staging
    lists: CapturableAttention | None = None
    graphs: Graphs | None = None

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start a step; see `EngineBackend.launch`."""
        replayed = self.graphs.launch(batch) if self.graphs else None
        logits, sample_rows = replayed or self._forward(batch)
        if not len(batch.sample):
            # Its end is waited for all the same: the host must not run ahead further than the pipeline is deep.
            return _mark(_NONE, None) if logits.is_cuda else Done(_NOTHING)
        sampled = self.sampler.sample(logits, batch.rows[batch.sample], batch.out_position)
        chosen = self.staging.finish(sample_rows, sampled.token_ids, sampled.logprobs, sampled.failed)
        return _to_host(chosen, sampled.tops) if logits.is_cuda else Done(_result(chosen, sampled.tops))

    def _forward(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, vocab] and their rows int64 [S], with every operation launched from here."""
        work = None
        if self.lists is not None:
            work = self.lists.work(HostRows(batch.rows, batch.num_decode, batch.query_len, batch.kv_len), None)
        step = self.staging.put(batch, work)
        ctx = ForwardContext(
            batch=step.attention,
            attention=self.attention,
            plan=self.attention.plan(step.attention),
            kernels=self.kernels,
            logits_index=step.logits_index,
        )
        return self.model.forward(step.token_ids, ctx), step.sample_rows


_NONE = torch.empty((3, 0), dtype=torch.int32)
_NOTHING = StepResult(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), {})


def _to_host(chosen: torch.Tensor, tops: Tops | None) -> InFlight:
    """Results on their way to pinned memory: one copy, and two more for rows that asked for alternatives."""
    if tops is not None:
        tops = Tops(tops.index, tops.counts, _pinned(tops.token_ids), _pinned(tops.logprobs))
    return _mark(_pinned(chosen), tops)


def _mark(chosen: torch.Tensor, tops: Tops | None) -> InFlight:
    event = torch.cuda.Event()
    event.record()
    return InFlight(chosen, tops, event)


def _pinned(source: torch.Tensor) -> torch.Tensor:
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return host.copy_(source, non_blocking=True)


def _result(chosen: torch.Tensor, tops: Tops | None) -> StepResult:
    """Packed results on the host to what the engine's loop reads."""
    ids, logprobs, failed = chosen.numpy()
    return StepResult(ids, logprobs.view(np.float32), failed.astype(np.bool_), _alternatives(tops))


def _alternatives(tops: Tops | None) -> dict[int, TopAlternatives]:
    if tops is None:
        return {}
    ids, logprobs = tops.token_ids.tolist(), tops.logprobs.tolist()
    return {
        index: TopAlternatives(tuple(ids[i][:count]), tuple(logprobs[i][:count]))
        for i, (index, count) in enumerate(zip(tops.index, tops.counts, strict=True))
    }
