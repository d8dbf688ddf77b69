"""Compiles for an H200, on any machine, all Triton kernels of captured steps and of sampling, with the arguments they get.

    python -m tests.kernels.compile_for_gpu

Launches compile and run nothing. One line a kernel; exit code 1 if one asks for more shared memory than there is, or if
the size of a step makes another kernel of it (it would be compiled while people wait).
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inferserve.attention.base import AttentionBatch, Bucket
from inferserve.attention.triton import TritonAttention
from inferserve.config.model_config import RopeConfig
from inferserve.engine import warmup
from inferserve.engine.graphs import Parts, capture
from inferserve.engine.recorder import EagerRecorder
from inferserve.engine.staging import DeviceRows
from inferserve.kernels.dispatch import TRITON
from inferserve.kernels.rope_write import Rotation
from inferserve.kernels.step_outputs import step_outputs
from inferserve.kv.pool import KvPool
from inferserve.layers.rotary import Rotary
from inferserve.models.decoder import Decoder
from inferserve.models.spec import DecoderSpec
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler

SHARED_MEMORY = 232_448
"""Bytes a program may have on compute capability 9.0."""
CPU = torch.device("cpu")
BUCKETS = (Bucket(320, 64, 64), Bucket(64, 64, 64), Bucket(48, 48, 0), Bucket(7, 7, 0), Bucket(1, 1, 0))
ROWS, LENGTH = 64, 512
QWEN: dict[str, Any] = {"size": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "qk_norm": True}
LLAMA: dict[str, Any] = {"size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "qk_norm": False}
CASES: tuple[tuple[str, dict[str, Any], torch.dtype, torch.dtype | None], ...] = (
    ("bf16, head norms", QWEN, torch.bfloat16, None),
    ("bf16", LLAMA, torch.bfloat16, None),
    ("fp8 KV", QWEN, torch.bfloat16, torch.float8_e4m3fn),
    ("int8 KV", QWEN, torch.bfloat16, torch.int8),
    ("fp32, window", {**QWEN, "windows": (64,)}, torch.float32, None),
)


class H200:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands in for launches: compiles, and remembers what came out, by case and kernel."""

    def __init__(self) -> None:
        self.case = ""
        self.found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._launch = JITFunction.run

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = self._launch(function, *args, grid=grid, warmup=True, **options)
        variants = self.found[self.case, function.fn.__name__]
        if kernel.hash not in variants:
            variants[kernel.hash] = kernel.metadata.shared
            print(f"{self.case:18} {function.fn.__name__:24} shared memory {kernel.metadata.shared:7}", flush=True)
        return kernel

    def problems(self) -> list[str]:
        large = [f"{key}: shared memory {n}" for key, v in self.found.items() for n in v.values() if n > SHARED_MEMORY]
        # A norm is of the stream or of heads; everything else of a model has one form.
        several = [
            f"{key}: {len(v)} forms of it"
            for key, v in self.found.items()
            if len(v) > 1 and key[0] != "sampling" and "norm" not in key[1]
        ]
        return large + several


def _rotation(rotary: Rotary, batch: AttentionBatch) -> Rotation:
    """What a GPU's kernels get: the tables."""
    return Rotation(rotary.tables.cos, rotary.tables.sin, batch.positions)


def _inputs(*arrays: torch.Tensor) -> torch.Tensor:
    """Ids that an embedding takes, since the kernel that makes them does not run."""
    TRITON.step_inputs(*arrays)
    return torch.zeros_like(arrays[0])


def compile_model(shape: dict[str, Any], dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Every bucket of a model of one layer."""
    fixed = {"vocab": 128, "inner": 512, "layers": 1, "norm_eps": 1e-6, "max_position": LENGTH, "tied": True}
    biases = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    spec = DecoderSpec(**{**fixed, **biases, "rope": RopeConfig(), "windows": (0,), **shape})
    torch.set_default_dtype(dtype)
    model = Decoder(spec)
    torch.set_default_dtype(torch.float32)
    model.prepare(LENGTH, CPU)
    pool = KvPool(model.kv_shapes, 1024, dtype, CPU, stored)
    kernels = replace(TRITON, step_inputs=_inputs)
    parts = Parts(model, TritonAttention(pool), kernels, DeviceRows.make(ROWS, LENGTH, CPU), pool.spare)
    capture(parts, BUCKETS, EagerRecorder())


def compile_sampling(vocab: int) -> None:
    """Every kind of row, and the end of a step."""
    sampler = Sampler(8, LENGTH, vocab, CPU, (2,))
    sampler._kernels = sampler._penalties._kernels = TRITON
    kinds: tuple[SamplingParams, ...] = (warmup._GREEDY, warmup._DRAWN, warmup._EVERYTHING, warmup._GREEDY_EDITED)
    rows, ones = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    for params in kinds:
        for row in rows:
            sampler.open_row(int(row), params, ones, ones)
        sampled = sampler.sample(torch.zeros((4, vocab), dtype=torch.bfloat16), rows, ones)
    step_outputs(
        torch.zeros(4, dtype=torch.int64), sampled.logprobs, sampled.failed, torch.arange(4), torch.zeros(9).long()
    )


def main() -> int:
    """See the module."""
    driver.set_active(H200())
    compiled = Compiled()
    JITFunction.run = lambda function, *args, **options: compiled.run(function, *args, **options)
    Rotary.forward = _rotation
    with torch.inference_mode():
        for compiled.case, shape, dtype, stored in CASES:
            compile_model(shape, dtype, stored)
        compiled.case = "sampling"
        for vocab in (128_256, 151_936):
            compile_sampling(vocab)
    problems = compiled.problems()
    print("\n".join(problems) or f"{sum(map(len, compiled.found.values()))} kernels")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
