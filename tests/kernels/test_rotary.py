"""Rotary kernel against its twin, and the twin against a rotation of complex numbers."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.rotary import apply_rotary, apply_rotary_ref
from tests.kernels.compare import DTYPES, assert_matches, random


def rotation(tokens: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = 9 * random(tokens, half, dtype=torch.float32, device=device, seed=9)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "k_heads", "head_dim", "rotated"),
    [
        (1, 9, 3, 64, 64),
        (7, 32, 8, 128, 128),
        (3, 5, 5, 80, 32),
        (4, 1, 1, 96, 96),
        (2, 12, 2, 256, 64),
        (0, 4, 2, 64, 64),
    ],
)
def test_apply_rotary(
    tokens: int, q_heads: int, k_heads: int, head_dim: int, rotated: int, dtype: torch.dtype, device: torch.device
) -> None:
    fused = random(tokens, (q_heads + 2 * k_heads) * head_dim, dtype=dtype, device=device)
    q = fused[:, : q_heads * head_dim].view(tokens, q_heads, head_dim)
    k = fused[:, q_heads * head_dim : (q_heads + k_heads) * head_dim].view(tokens, k_heads, head_dim)
    cos, sin = rotation(tokens, rotated // 2, device)
    for out, ref in zip(apply_rotary(q, k, cos, sin), apply_rotary_ref(q, k, cos, sin), strict=True):
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert_matches(out, ref, dtype)


def test_the_rest_of_a_head_passes_bit_for_bit(device: torch.device) -> None:
    q, k = (random(3, 4, 40, dtype=torch.float16, device=device, seed=s) for s in (0, 1))
    cos, sin = rotation(3, 8, device)
    for op in (apply_rotary, apply_rotary_ref):
        q_out, k_out = op(q, k, cos, sin)
        assert torch.equal(q_out[..., 16:], q[..., 16:])
        assert torch.equal(k_out[..., 16:], k[..., 16:])


def test_the_twin_rotates_pairs() -> None:
    x = random(5, 2, 32, dtype=torch.float32, device=torch.device("cpu"))
    cos, sin = rotation(5, 16, torch.device("cpu"))
    turned = torch.complex(x[..., :16], x[..., 16:]) * torch.complex(cos, sin)[:, None, :]
    out, _ = apply_rotary_ref(x, x, cos, sin)
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-6)
