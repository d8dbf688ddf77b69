"""fp8 products of every scaling and launch shape against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferserve.kernels.fp8_matmul import QUANTISED_INSIDE, TILES, Fp8Tiles, fp8_matmul, fp8_matmul_ref
from inferserve.kernels.fp8_quant import GROUP, fp8_quant_ref
from tests.kernels.compare import DTYPES, assert_matches, random

SHAPES = [(1, 256, 128), (7, 200, 70), (16, 1152, 192), (0, 128, 64)]
"""Tokens, inputs, outputs: with whole and partial blocks."""


def scales(kind: str, outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    """Of W: per channel, blocks of 128 × 128, or rows × 128."""
    groups = -(-inputs // GROUP)
    shape = {"channel": (outputs,), "block": (-(-outputs // GROUP), groups), "rows": (outputs, groups)}[kind]
    return random(*shape, dtype=torch.float32, device=device, seed=9).abs() + 0.1


def weights(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    return random(outputs, inputs, dtype=torch.float32, device=device, seed=2).mul(50).to(torch.float8_e4m3fn)


def exactness(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Whose tolerance holds: Hopper's matrix unit adds fp8 products up with some 14 bits."""
    return torch.float16 if device.type == "cuda" and dtype == torch.float32 else dtype


def split(tiles: Fp8Tiles) -> Fp8Tiles:
    """The same launch with K split."""
    return replace(tiles, programs=16, stages=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["channel", "block", "rows"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_quantised_inside(
    rows: int, inputs: int, outputs: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = random(rows, 2 * inputs, dtype=dtype, device=device)[:, :inputs]
    weight, w_scale = weights(outputs, inputs, device), scales(kind, outputs, inputs, device)
    bias = random(outputs, dtype=dtype, device=device, seed=3) if kind == "block" else None
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    for tiles in (TILES[0], split(TILES[0])):
        out = fp8_matmul(x, None, weight, w_scale, bias, counters, dtype, tiles)
        assert out.dtype == dtype
        wanted = fp8_matmul_ref(x, None, weight, w_scale, bias, counters, dtype)
        assert_matches(out, wanted, exactness(dtype, device))
        assert not counters.any()


@pytest.mark.parametrize("tiles", TILES, ids=lambda t: f"{t.block_m}x{t.block_n}")
@pytest.mark.parametrize(("kind", "group"), [("channel", 0), ("channel", GROUP), ("block", GROUP), ("rows", GROUP)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(33, 200, 140), (20, 1024, 128)])
def test_quantised_before(
    rows: int, inputs: int, outputs: int, kind: str, group: int, tiles: Fp8Tiles, device: torch.device
) -> None:
    x, x_scale = fp8_quant_ref(random(rows, inputs, dtype=torch.float32, device=device), group)
    weight, w_scale = weights(outputs, inputs, device), scales(kind, outputs, inputs, device)
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    out = fp8_matmul(x, x_scale, weight, w_scale, None, counters, torch.float32, split(tiles))
    wanted = fp8_matmul_ref(x, x_scale, weight, w_scale, None, counters, torch.float32)
    assert_matches(out, wanted, exactness(torch.float32, device))
    assert not counters.any()


def test_launches_are_ordered_and_inside_quantisation_has_one() -> None:
    limits = [tiles.rows for tiles in TILES]
    assert limits == sorted(limits) and QUANTISED_INSIDE in limits
    assert all(GROUP % tiles.block_n == 0 for tiles in TILES)
