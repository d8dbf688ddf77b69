"""Inputs of `fused_gpu` and its checks: model shapes, fresh random tensors, pools with poisoned places, samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.kernels.kv_quant import is_quantised
from inferserve.kernels.rope_write import PackedHeads, Rotation
from inferserve.kernels.sampling_filter import FilterParams
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.draws import DrawParams
from inferserve.sampling.sampler import Sampler

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
VOCAB = 128256
_PLACES = 20_000

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50": SamplingParams(top_k=50),
    "top-k 20, top-p 0.8": SamplingParams(top_k=20, top_p=0.8),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "greedy, logprob": SamplingParams(temperature=0.0, logprobs=0),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "bias": SamplingParams(temperature=0.0, logit_bias={11: 3.0, 12: -2.0}),
    "mixed": SamplingParams(),
}
"""Params by name; "mixed" is all the others in turn."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's layers; `normed` = RMSNorm over query and key heads."""

    name: str
    size: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    normed: bool


EIGHT_B = ModelShape("8B", 4096, 14336, 32, 8, 128, False)
SMALL = ModelShape("0.6B", 1024, 3072, 16, 8, 128, True)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Fresh standard normal numbers at each call."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an output element that nobody writes shows."""
    for size in (2**12, 2**16, 2**20, 2**24):
        blocks = [torch.full((size // 4,), torch.nan, device=DEVICE) for _ in range(4)]
        del blocks


@dataclass(frozen=True)
class RopeCase:
    """Arguments of `rope_write`."""

    qkv: torch.Tensor
    heads: PackedHeads
    rotation: Rotation
    pools: tuple[torch.Tensor, ...]
    index: torch.Tensor
    scales: tuple[torch.Tensor | None, ...]

    def run(self, op: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Queries; K and V go to the pools."""
        return op(self.qkv, self.heads, self.rotation, *self.pools, self.index, *self.scales)

    def empty(self) -> RopeCase:
        """The same with pools of their own."""
        scales = tuple(None if s is None else torch.full_like(s, torch.nan) for s in self.scales)
        return RopeCase(self.qkv, self.heads, self.rotation, tuple(map(_emptied, self.pools)), self.index, scales)


def _emptied(pool: torch.Tensor) -> torch.Tensor:
    return (
        torch.full(pool.shape, 1, dtype=torch.int8, device=DEVICE).view(pool.dtype)
        if is_quantised(pool.dtype)
        else torch.full_like(pool, torch.nan)
    )


def rope_case(shape: ModelShape, tokens: int, stored: torch.dtype) -> RopeCase:
    """Random heads at random positions into random places of a pool stored as `stored`."""
    width = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    q_norm, k_norm = (random(shape.head_dim) if shape.normed else None for _ in "qk")
    angles = 9 * random(8192, shape.head_dim // 2, dtype=torch.float32)
    pools = tuple(torch.empty(_PLACES, shape.kv_heads, shape.head_dim, dtype=stored, device=DEVICE) for _ in "kv")
    scale = torch.empty(_PLACES, shape.kv_heads, device=DEVICE) if is_quantised(stored) else None
    return RopeCase(
        random(tokens, width),
        PackedHeads(shape.q_heads, shape.kv_heads, shape.head_dim, q_norm, k_norm, 1e-6),
        Rotation(angles.cos(), angles.sin(), torch.randint(8192, (tokens,), device=DEVICE)),
        tuple(map(_emptied, pools)),
        torch.randperm(_PLACES, device=DEVICE)[:tokens],
        (scale, None if scale is None else scale.clone()),
    )


def params_of(kind: str, row: int) -> SamplingParams:
    """Of a row whose sampler does `kind`."""
    names = [name for name in KINDS if name != "mixed"]
    return msgspec.structs.replace(KINDS[names[row % len(names)] if kind == "mixed" else kind], seed=row)


def make_sampler(
    kind: str, rows: int, device: torch.device | None = None
) -> tuple[Sampler, torch.Tensor, NDArray[np.int32]]:
    """A sampler with all rows open after prompts of 500 tokens, logits for them, and their numbers."""
    sampler = Sampler(rows, 4096, VOCAB, device or DEVICE, (7,))
    for row in range(rows):
        prompt = np.random.default_rng(row).integers(0, VOCAB, 500, dtype=np.int32)
        sampler.open_row(row, params_of(kind, row), prompt, prompt[:100])
    return sampler, random(rows, VOCAB) * 2.5, np.arange(rows, dtype=np.int32)


def filter_params(kind: str, rows: int) -> FilterParams:
    """The sampling filter's columns, for rows of one kind."""
    draws, numbers = DrawParams(rows, VOCAB), np.arange(rows)
    for row in range(rows):
        draws.open(row, params_of(kind, row))
    columns = draws.columns(numbers, numbers, numbers.astype(np.int32), numbers.astype(np.int32))
    return FilterParams(torch.from_numpy(columns.table).to(DEVICE), columns.filtered, columns.max_top_k, True)
