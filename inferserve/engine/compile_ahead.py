"""The model's Triton kernels compiled while its weights load, by children that leave them in Triton's cache.

A launch waits for its kernel to be compiled, one after another: half a minute where this model has never run. A forked
child makes the launches of a step on tensors without data (device "meta"), which compiles and runs nothing; each of
several children keeps to its share of the kernels. One that fails or is too late costs nothing: what the cache does not
hold is compiled at its first launch, as ever.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inferserve.attention.base import Bucket
from inferserve.attention.triton import TritonAttention
from inferserve.engine.graphs import Parts, record
from inferserve.engine.recorder import EagerRecorder
from inferserve.engine.staging import DeviceRows
from inferserve.engine.static_inputs import StaticInputs, Upload, size
from inferserve.engine.warmup import KINDS
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.models.decoder import Decoder
from inferserve.models.spec import DecoderSpec
from inferserve.sampling.sampler import Sampler

_META = torch.device("meta")
_PR_SET_PDEATHSIG = 1
_PLACES = 64


@dataclass(frozen=True)
class ModelLaunches:
    """All launches of a model's steps, once each, on tensors without data.

    Attributes:
        spec: a rank's share of the stack.
        dtype: of weights and activations.
        stored: how K and V are stored; None = as `dtype`.
        rows, length: sequences that run at once, tokens of the longest.
        deterministic: see --deterministic.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    stored: torch.dtype | None
    rows: int
    length: int
    deterministic: bool = False

    @torch.inference_mode()
    def make(self, buckets: Sequence[Bucket] = ()) -> None:
        """Captured steps of `buckets` (one of each kind if there are none), then all kinds of sampling."""
        model, kernels = self._model(), kernels_for(_META)
        pool = KvPool(model.kv_shapes, _PLACES, self.dtype, _META, self.stored)
        attention = TritonAttention(pool, self.deterministic)
        parts = Parts(model, attention, kernels, DeviceRows.make(self.rows, self.length, _META), pool.spare)
        sizes = (32, 64, 128, 256, 512) if self.spec.quant else (64,)  # products in fp8 differ by size
        for bucket in buckets or (*(Bucket(n, self.rows, self.rows) for n in sizes), Bucket(1, 1, 0)):
            work = attention.work_size(bucket)
            upload = Upload(size(bucket, work), _META)
            record(parts, StaticInputs(bucket, work, upload, parts.rows, pool.spare), EagerRecorder())
        sampler = Sampler(len(KINDS), self.length, self.spec.vocab, _META, ())
        logits, one = torch.empty((1, self.spec.vocab), dtype=self.dtype, device=_META), np.ones(1, np.int32)
        for row, kind in enumerate(KINDS):
            sampler.open_row(row, kind, one, one)
            sampled = sampler.sample(logits, np.full(1, row, np.int32), one)
        row_of = torch.empty(1, dtype=torch.int64, device=_META)
        kernels.step_outputs(sampled.token_ids, sampled.logprobs, sampled.failed, row_of, parts.rows.last_token)

    def _model(self) -> Decoder:
        """One layer of each window."""
        windows = tuple(dict.fromkeys(self.spec.windows))
        windows += windows[-1:] if self.spec.quant else ()  # whose last layer is not quantised as a whole
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with _META:
                model = Decoder(replace(self.spec, layers=len(windows), windows=windows))
        finally:
            torch.set_default_dtype(before)
        model.prepare(self.length, _META, self.deterministic)
        return model


@dataclass(frozen=True)
class _NoDevice:
    """As much of a Triton driver as compiling asks for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_only(target: GPUTarget, note: Callable[[str, Any], None], share: int = 0, shares: int = 1) -> None:
    """From now on launches in this process compile for `target`, and run nothing.

    Args:
        note: is told the name and the compiled kernel of every launch.
        share: only every `shares`-th kernel, from this one on, is compiled at all.
    """
    compile_kernel = JITFunction.run
    order: dict[str, int] = {}

    def stand_in(function: Any, *args: Any, **options: Any) -> None:
        name = function.fn.__name__
        if order.setdefault(f"{name} {_constants(options)}", len(order)) % shares == share:
            note(name, compile_kernel(function, *args, **{**options, "warmup": True}))

    driver.set_active(_NoDevice(target))
    JITFunction.run = stand_in


def _constants(options: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted((name, value) for name, value in options.items() if isinstance(value, int | str))


class Compilers:
    """Children at work.

    Args:
        launches: what to compile.
        target: for which GPU.
        shares: those of the kernels that this process is to see to; a child for each.
        of: into how many shares the kernels are divided.
    """

    def __init__(self, launches: ModelLaunches, target: GPUTarget, shares: range, of: int) -> None:
        self._children = [_fork(launches, target, share, of) for share in shares]

    def wait(self, seconds: float) -> int:
        """Until all are done; those that are not after `seconds` are killed. Returns how many did their share."""
        end, done = time.monotonic() + seconds, 0
        for child in self._children:
            watched = os.pidfd_open(child)
            try:
                if not select.select([watched], [], [], max(0.0, end - time.monotonic()))[0]:
                    os.kill(child, signal.SIGKILL)
            finally:
                os.close(watched)
            done += os.waitpid(child, 0)[1] == 0
        self._children = []
        return done


def _fork(launches: ModelLaunches, target: GPUTarget, share: int, shares: int) -> int:
    """Start a child; in the child this never returns."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        compile_only(target, lambda *_: None, share, shares)
        launches.make()
        status = 0
    finally:
        os._exit(status)  # whatever was raised: nothing of the parent's may run here
