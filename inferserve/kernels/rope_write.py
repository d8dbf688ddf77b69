"""What stands between the fused query-key-value product and attention, in one pass over it.

RMSNorm of each query and key head (where a model has it), rotary position embedding, K and V into the paged pool
(quantised where the pool is, see `kv_write`), and queries out. "Neox" layout: the first half of the rotated part of a
head pairs with the second. Formulas: Zhang and Sennrich, arXiv 1910.07467; Su et al., arXiv 2104.09864, section 3.4.2.
Where cos and sin come from (scaling kinds) is the caller's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from inferserve.kernels.kv_quant import LARGEST
from inferserve.kernels.kv_write import copy_heads, encode, head_scale, kv_write_ref
from inferserve.kernels.launch_config import next_power_of_2

_HEADS_PER_PROGRAM = 8


class Rotation(NamedTuple):
    """Angles of a step's tokens.

    Attributes:
        cos, sin: float32 [N, rotated / 2], contiguous; rotated <= head_dim, the rest of a head passes unchanged.
        line: int64 [T], each token's line of the two; None = line t is token t's.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    line: torch.Tensor | None


@dataclass(frozen=True)
class PackedHeads:
    """What a row of the fused product holds: query heads, then key heads, then value heads.

    Attributes:
        q_heads, kv_heads, head_dim: sizes.
        q_norm, k_norm: [head_dim] weights of the heads' RMSNorm, both or neither.
        eps: of that norm.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@triton.jit
def _rotated(
    source: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Float32 tiles of some heads: first and second half of the rotated part, and the rest."""
    col = tl.arange(0, HALF_BLOCK)
    live = (head < HEADS)[:, None] & (col < HALF)[None, :]
    base = source + head[:, None] * DIM
    first = tl.load(base + col[None, :], mask=live, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + col[None, :], mask=live, other=0.0).to(tl.float32)
    # Without a rest the tile is one column of nothing.
    tail = 2 * HALF + tl.arange(0, REST_BLOCK)
    rest = tl.load(base + tail[None, :], mask=(head < HEADS)[:, None] & (tail < DIM)[None, :], other=0.0).to(tl.float32)
    if NORM:
        gain_first = tl.load(weight + col, mask=col < HALF, other=0.0).to(tl.float32)
        gain_second = tl.load(weight + HALF + col, mask=col < HALF, other=0.0).to(tl.float32)
        gain_rest = tl.load(weight + tail, mask=tail < DIM, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        first = first * scale * gain_first[None, :]
        second = second * scale * gain_second[None, :]
        rest = rest * scale * gain_rest[None, :]
    return first * cos - second * sin, second * cos + first * sin, rest


@triton.jit
def _store_heads(
    target: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    to: tl.constexpr = target.dtype.element_ty
    col = tl.arange(0, HALF_BLOCK)
    live = (head < HEADS)[:, None] & (col < HALF)[None, :]
    base = target + head[:, None] * DIM
    tl.store(base + col[None, :], encode(first, scale, to, LARGEST), mask=live)
    tl.store(base + HALF + col[None, :], encode(second, scale, to, LARGEST), mask=live)
    if 2 * HALF < DIM:
        tail = 2 * HALF + tl.arange(0, REST_BLOCK)
        real = (head < HEADS)[:, None] & (tail < DIM)[None, :]
        tl.store(base + tail[None, :], encode(rest, scale, to, LARGEST), mask=real)


# The indexes lie anywhere in one upload of many arrays.
@triton.jit(do_not_specialize_on_alignment=["index", "kv_index"])
def _rope_write_kernel(
    qkv: tl.tensor,
    q_out: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    index: tl.tensor,
    pool_k: tl.tensor,
    pool_v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    kv_index: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEXED: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    k_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    row = qkv + token * stride
    if block < q_blocks + k_blocks:
        line = tl.load(index + token).to(tl.int64) if INDEXED else token
        col = tl.arange(0, HALF_BLOCK)
        c = tl.load(cos + line * HALF + col, mask=col < HALF, other=0.0)[None, :]
        s = tl.load(sin + line * HALF + col, mask=col < HALF, other=0.0)[None, :]
        if block < q_blocks:
            q_head = block * HEADS + tl.arange(0, HEADS)
            q_first, q_second, q_rest = _rotated(
                row, q_norm, c, s, q_head, eps, Q_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM
            )
            q_row = q_out + token * (Q_HEADS * DIM)
            _store_heads(
                q_row, q_head, q_first, q_second, q_rest, q_rest, Q_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, 0
            )
        else:
            k_head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            k_slot = tl.load(kv_index + token).to(tl.int64)
            first, second, rest = _rotated(
                row + Q_HEADS * DIM, k_norm, c, s, k_head, eps, KV_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM
            )
            peak = tl.maximum(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1), tl.max(tl.abs(rest), axis=1))
            scale = head_scale(peak, LARGEST) if LARGEST > 0 else peak
            k_row = pool_k + k_slot * (KV_HEADS * DIM)
            _store_heads(
                k_row, k_head, first, second, rest, scale[:, None], KV_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, LARGEST
            )
            if LARGEST > 0:
                tl.store(k_scale + k_slot * KV_HEADS + k_head, scale, mask=k_head < KV_HEADS)
    else:
        v_head = (block - q_blocks - k_blocks) * HEADS + tl.arange(0, HEADS)
        v_slot = tl.load(kv_index + token).to(tl.int64)
        values = qkv + (Q_HEADS + KV_HEADS) * DIM
        copy_heads(values, pool_v, v_scale, token, v_slot, v_head, stride, KV_HEADS, DIM, BLOCK, LARGEST)


def rope_write(
    qkv: torch.Tensor,
    heads: PackedHeads,
    rotation: Rotation,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    kv_index: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to the pool.

    Args:
        qkv: [T, (q_heads + 2 kv_heads) * head_dim], float, last dimension contiguous.
        pool_k, pool_v, kv_index, k_scale, v_scale: as in `kv_write`; both pools' heads are `head_dim` wide.

    Returns: queries, [T, q_heads, head_dim], contiguous, qkv's dtype.
    """
    tokens, dim, half = qkv.shape[0], heads.head_dim, rotation.cos.shape[1]
    q = torch.empty((tokens, heads.q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    size = min(_HEADS_PER_PROGRAM, next_power_of_2(heads.q_heads))
    blocks = triton.cdiv(heads.q_heads, size) + 2 * triton.cdiv(heads.kv_heads, size)
    _rope_write_kernel[(tokens, blocks)](
        qkv,
        q,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        rotation.cos,
        rotation.sin,
        kv_index if rotation.line is None else rotation.line,
        pool_k,
        pool_v,
        pool_k if k_scale is None else k_scale,
        pool_v if v_scale is None else v_scale,
        kv_index,
        qkv.stride(0),
        heads.eps,
        Q_HEADS=heads.q_heads,
        KV_HEADS=heads.kv_heads,
        DIM=dim,
        HALF=half,
        HEADS=size,
        HALF_BLOCK=next_power_of_2(half),
        REST_BLOCK=next_power_of_2(max(dim - 2 * half, 1)),
        BLOCK=next_power_of_2(dim),
        INDEXED=rotation.line is not None,
        NORM=heads.q_norm is not None,
        LARGEST=LARGEST.get(pool_k.dtype, 0.0),
        num_warps=2,
    )
    return q


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Float32 [T, heads, dim] rotated by float32 [T, rotated / 2]."""
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        return torch.cat((_rotate_ref(x[..., : 2 * half], cos, sin), x[..., 2 * half :]), dim=-1)
    first, second = x[..., :half], x[..., half:]
    # Two fused multiply-adds on halves of one product: on the CPU the number of ops is what costs at decode.
    out = torch.mul(x.unflatten(-1, (2, half)), cos[:, None, None, :])
    out[..., 0, :].addcmul_(second, sin[:, None, :], value=-1)
    out[..., 1, :].addcmul_(first, sin[:, None, :])
    return out.flatten(-2)


def rotated_heads_ref(
    qkv: torch.Tensor, heads: PackedHeads, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised and rotated, and values: [T, heads, head_dim] each, qkv's dtype; arguments as in
    `rope_write`."""
    cos, sin, line = rotation
    if line is not None:
        cos, sin = cos.index_select(0, line), sin.index_select(0, line)
    q_heads, turned_heads = heads.q_heads, heads.q_heads + heads.kv_heads
    packed = qkv.view(qkv.shape[0], turned_heads + heads.kv_heads, heads.head_dim)
    turned = packed[:, :turned_heads].float()
    if heads.q_norm is not None and heads.k_norm is not None:
        norm, width = torch.nn.functional.rms_norm, (heads.head_dim,)
        q = norm(turned[:, :q_heads], width, heads.q_norm.float(), heads.eps)
        k = norm(turned[:, q_heads:], width, heads.k_norm.float(), heads.eps)
        turned = torch.cat((q, k), dim=1)
    turned = _rotate_ref(turned, cos, sin).to(qkv.dtype)
    return turned[:, :q_heads], turned[:, q_heads:], packed[:, turned_heads:]


def rope_write_ref(
    qkv: torch.Tensor,
    heads: PackedHeads,
    rotation: Rotation,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    kv_index: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch twin of `rope_write`."""
    q, k, v = rotated_heads_ref(qkv, heads, rotation)
    kv_write_ref(k, v, pool_k, pool_v, kv_index, k_scale, v_scale)
    return q.contiguous()
