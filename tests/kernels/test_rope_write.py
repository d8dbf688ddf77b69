"""The kernel between the fused projection and attention against its twin, and the twin against plain formulas."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.kv_quant import LARGEST
from inferserve.kernels.rope_write import PackedHeads, Rotation, rope_write, rope_write_ref, rotated_heads_ref
from tests.kernels.compare import DTYPES, assert_codes_match, assert_matches, poisoned, random

CPU = torch.device("cpu")
PLACES = 50
SHAPES = [
    (1, 9, 3, 64, 64),
    (7, 32, 8, 128, 128),
    (3, 5, 5, 80, 32),
    (4, 1, 1, 96, 96),
    (2, 12, 2, 256, 64),
    (3, 10, 10, 32, 20),
    (0, 4, 2, 64, 64),
]


def heads_of(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, norm: bool
) -> PackedHeads:
    if not norm:
        return PackedHeads(q_heads, kv_heads, head_dim)
    q_norm, k_norm = (1 + 0.3 * random(head_dim, dtype=dtype, device=device, seed=seed) for seed in (5, 6))
    return PackedHeads(q_heads, kv_heads, head_dim, q_norm, k_norm, 1e-6)


def rotation_of(tokens: int, half: int, device: torch.device, *, indexed: bool) -> Rotation:
    lines = 3 * tokens + 1 if indexed else tokens
    angle = 9 * random(lines, half, dtype=torch.float32, device=device, seed=9)
    index = torch.randperm(lines, generator=torch.Generator().manual_seed(3))[:tokens].to(device)
    return Rotation(angle.cos(), angle.sin(), index if indexed else None)


def places(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(PLACES, generator=torch.Generator().manual_seed(2))[:tokens].to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("indexed", [False, True], ids=["lines", "table"])
@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads", "head_dim", "rotated"), SHAPES)
def test_rope_write(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    indexed: bool,
    norm: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads = heads_of(q_heads, kv_heads, head_dim, dtype, device, norm=norm)
    rotation = rotation_of(tokens, rotated // 2, device, indexed=indexed)
    wide = random(tokens, (q_heads + 2 * kv_heads) * head_dim + 16, dtype=dtype, device=device)
    qkv, index = wide[:, :-16], places(tokens, device)
    results = []
    for op in (rope_write, rope_write_ref):
        pools = [poisoned(PLACES, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
        q = op(qkv, heads, rotation, *pools, index)
        assert q.shape == (tokens, q_heads, head_dim)
        assert q.dtype == dtype
        assert q.is_contiguous()
        for pool in pools:
            assert int(pool.isnan().all(-1).all(-1).sum()) == PLACES - tokens
        results.append((q, pools[0][index], pools[1][index]))
    for out, ref in zip(*results, strict=True):
        assert_matches(out, ref, dtype)
    assert torch.equal(results[0][2], qkv.unflatten(1, (-1, head_dim))[:, q_heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", LARGEST, ids=str)
@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads", "head_dim", "rotated"), SHAPES)
def test_into_quantised_pools(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    stored: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads = heads_of(q_heads, kv_heads, head_dim, dtype, device, norm=True)
    rotation = rotation_of(tokens, rotated // 2, device, indexed=True)
    qkv = random(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    index, results = places(tokens, device), []
    for op in (rope_write, rope_write_ref):
        pools = [
            torch.full((PLACES, kv_heads, head_dim), 77, dtype=torch.int8, device=device).view(stored) for _ in "kv"
        ]
        scales = [poisoned(PLACES, kv_heads, dtype=torch.float32, device=device) for _ in "kv"]
        q = op(qkv, heads, rotation, *pools, index, *scales)
        results.append((q, *pools, *scales))
    (q, *written), (q_ref, *expected) = results
    assert_matches(q, q_ref, dtype)
    # The kernel quantises before rounding to the model's dtype, the twin after it.
    rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for out, ref in zip(written[2:], expected[2:], strict=True):
        torch.testing.assert_close(out, ref, equal_nan=True, rtol=rounding, atol=0)
    assert_codes_match(written[0], expected[0], {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.25}[dtype])
    assert_codes_match(written[1], expected[1])


def test_tokens_that_share_a_place_leave_the_others_alone(device: torch.device) -> None:
    """Padding of a captured step goes to one spare place."""
    heads, rotation = heads_of(4, 2, 32, torch.float32, device, norm=False), rotation_of(5, 16, device, indexed=True)
    qkv = random(5, 8 * 32, dtype=torch.float32, device=device)
    index = torch.tensor([3, 9, 9, 1, 9], device=device)
    pools = [poisoned(10, 2, 32, dtype=torch.float32, device=device) for _ in "kv"]
    rope_write(qkv, heads, rotation, *pools, index)
    _, k, v = rotated_heads_ref(qkv, heads, rotation)
    for pool, source in zip(pools, (k, v), strict=True):
        torch.testing.assert_close(pool[[3, 1]], source[[0, 3]])
        assert int(pool.isnan().all(-1).all(-1).sum()) == 7


def test_the_twin_rotates_pairs() -> None:
    x = random(5, 2 * 32, dtype=torch.float32, device=CPU)
    rotation = rotation_of(5, 16, CPU, indexed=False)
    q, k, v = rotated_heads_ref(torch.cat((x, x[:, :32], x[:, :32]), 1), PackedHeads(2, 1, 32), rotation)
    pairs = x.view(5, 2, 32)
    turned = torch.complex(pairs[..., :16], pairs[..., 16:]) * torch.complex(*rotation[:2])[:, None, :]
    torch.testing.assert_close(q, torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-6)
    assert torch.equal(k[:, 0], q[:, 0])
    assert torch.equal(v[:, 0], x[:, :32])


def test_the_twin_normalises_before_it_rotates() -> None:
    heads = heads_of(3, 2, 16, torch.float32, CPU, norm=True)
    rotation = rotation_of(4, 6, CPU, indexed=False)
    qkv = random(4, 7 * 16, dtype=torch.float64, device=CPU)
    q, k, _ = rotated_heads_ref(qkv.float(), heads, rotation)
    for out, part, weight in ((q, qkv[:, :48], heads.q_norm), (k, qkv[:, 48:80], heads.k_norm)):
        x = part.unflatten(1, (-1, 16))
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        turned = torch.complex(x[..., :6], x[..., 6:12]) * torch.complex(*rotation[:2])[:, None, :].to(torch.complex128)
        expected = torch.cat((turned.real, turned.imag, x[..., 12:]), -1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
