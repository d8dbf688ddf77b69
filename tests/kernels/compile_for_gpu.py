"""Compiles for an H200, on any machine, the Triton kernels of steps and of sampling, with the arguments they get.

    python -m tests.kernels.compile_for_gpu

One line a kernel. Exit code 1 if one asks for more shared memory than there is, or if the size of a step makes another
kernel of it (it would be compiled while people wait).
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

import sys
from collections import defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from inferserve.attention.base import Bucket
from inferserve.config.model_config import RopeConfig
from inferserve.engine.compile_ahead import ModelLaunches, compile_only
from inferserve.kernels.kv_write import kv_write
from inferserve.kernels.merge_attention import merge_attention
from inferserve.layers.quant import Fp8Scheme
from inferserve.models.spec import DecoderSpec

SHARED_MEMORY = 232_448
"""Bytes a program may have on compute capability 9.0."""
ROWS, LENGTH = 64, 512
BUCKETS = (Bucket(320, 64, 64), Bucket(64, 64, 64), Bucket(48, 48, 0), Bucket(7, 7, 0), Bucket(1, 1, 0))
SPEC = DecoderSpec(
    vocab=151_936,
    size=1024,
    inner=3072,
    layers=1,
    heads=16,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    rope=RopeConfig(),
    max_position=LENGTH,
    windows=(0,),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    tied=True,
)
LLAMA: dict[str, Any] = {"vocab": 128_256, "size": 4096, "inner": 14336, "heads": 32, "qk_norm": False}
CASES: tuple[tuple[str, dict[str, Any], torch.dtype, torch.dtype | None], ...] = (
    ("bf16, head norms", {}, torch.bfloat16, None),
    ("bf16", LLAMA, torch.bfloat16, None),
    ("fp8 KV", {}, torch.bfloat16, torch.float8_e4m3fn),
    ("int8 KV", {}, torch.bfloat16, torch.int8),
    ("fp8 weights", {**LLAMA, "quant": Fp8Scheme(blocks=False)}, torch.bfloat16, None),
    ("fp8 weight blocks", {**LLAMA, "quant": Fp8Scheme(blocks=True)}, torch.bfloat16, None),
    ("fp32, window", {"windows": (64,)}, torch.float32, None),
    ("partial rotary", {"head_dim": 80, "rope": RopeConfig(partial=0.4)}, torch.bfloat16, None),
    ("partial, fp8 KV", {"head_dim": 256, "rope": RopeConfig(partial=0.25)}, torch.bfloat16, torch.float8_e4m3fn),
)
FORMS = {
    "_rms_norm_kernel": 2,
    "_silu_mul_kernel": 2,
    "_filter_sample_kernel": 4,
    "_join_kernel": 4,
    "_best_kernel": 2,
    "_piece_kernel": 2,
    "_fp8_matmul_kernel": 6,
    "_fp8_quant_kernel": 2,
}
"""Most forms of a kernel within a case, if more than one: with and without a residual, by kinds of sampling,
for few tokens; products by the size of their tiles, and whether several programs add them up."""


class Compiled:
    """What came out, by case and kernel."""

    def __init__(self) -> None:
        self.case = ""
        self.found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)

    def note(self, name: str, kernel: Any) -> None:
        forms = self.found[self.case, name]
        if kernel.hash not in forms:
            forms[kernel.hash] = kernel.metadata.shared
            print(f"{self.case:18} {name:24} shared memory {kernel.metadata.shared:7}", flush=True)

    def problems(self) -> list[str]:
        return [
            *(f"{key}: shared memory {n}" for key, v in self.found.items() for n in v.values() if n > SHARED_MEMORY),
            *(f"{key}: {len(v)} forms" for key, v in self.found.items() if len(v) > FORMS.get(key[1], 1)),
        ]


def launch_uncaptured() -> None:
    """What long chunks and models of transformers launch besides."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size, skipped in ((2304, 256), (4096, 0)):
        out, lse = empty(size, 32, 128)[skipped:], empty(32, size, dtype=torch.float32)[:, skipped:]
        merge_attention(out, lse, empty(*out.shape), empty(*lse.shape, dtype=torch.float32))
    for tokens in (1, 64):
        k, pool, index = empty(tokens, 8, 128), empty(100, 8, 128), empty(tokens, dtype=torch.int64)
        kv_write(k, k, pool, pool, index)


def main() -> int:
    """See the module."""
    compiled = Compiled()
    compile_only(GPUTarget("cuda", 90, 32), compiled.note)
    for compiled.case, shape, dtype, stored in CASES:
        spec = DecoderSpec(**{**vars(SPEC), **shape})
        ModelLaunches(spec, dtype, stored, ROWS, LENGTH).make(BUCKETS)
    compiled.case = "deterministic"
    spec = DecoderSpec(**{**vars(SPEC), **LLAMA})
    ModelLaunches(spec, torch.bfloat16, None, ROWS, LENGTH, deterministic=True).make(BUCKETS)
    compiled.case = "not captured"
    launch_uncaptured()
    problems = compiled.problems()
    print("\n".join(problems) or f"{sum(map(len, compiled.found.values()))} kernels")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
