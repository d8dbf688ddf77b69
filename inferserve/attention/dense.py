"""Attention of one long prompt chunk through a dense library kernel (cuDNN's), over cached prefix and chunk.

Such kernels are the fastest there are, but know neither pages nor any shape but the ones they were built for, and
building takes 40 ms and more. So the keys are gathered from the pool in pieces of few lengths: the chunk itself, a causal
square, takes in what is left of the prefix when whole pieces have been cut off it. The pieces' results are joined by
their log-sum-exp. Knows no work lists, and no layers with windows or caps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inferserve.kernels.merge_attention import merge_attention
from inferserve.kernels.paged_kv import PagedKv

LEAST_QUERIES = 4096
"""What the default chunk of a long prompt is: shorter ends of prompts have any length, and would have kernels built for
each while people wait, for a share of the step that attention hardly takes there."""
_LEAST_PIECE = 1024
_ROUND = 256
"""Squares come in multiples of this many tokens."""


class Piece(NamedTuple):
    """`length` tokens of a context, from `start`."""

    start: int
    length: int


class DenseOp(Protocol):
    """The library's kernel."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of q [1, heads, S, D] over k and v [1, kv_heads, N, D], and its log-sum-exp, float32 [1, heads, S, 1].

        Causal: query i sees keys 0 to i.
        """


class Merge(Protocol):
    """`kernels.merge_attention.merge_attention` or its twin."""

    def __call__(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """See there."""


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """A `DenseOp`: what torch calls for scaled dot-product attention with its cuDNN backend."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse


def refusal(op: DenseOp, heads: int, kv_heads: int, like: Tensor) -> str:
    """Why the library cannot run such heads here, '' if it can: which it can depends on its version and on the device.

    Args:
        like: [_, _, D], dtype, device and head size of all tensors.
    """
    q, k = (like.new_zeros((_ROUND, n, like.shape[2])).transpose(0, 1)[None] for n in (heads, kv_heads))
    try:
        op(q, k, k, causal=True, scale=1.0)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def pieces(prefix: int) -> list[Piece]:
    """What is cut off a prefix, from its beginning: lengths of three significant bits, in units of 1024 tokens or more.

    Less than 1024 tokens are left.
    """
    found: list[Piece] = []
    start = 0
    while prefix - start >= _LEAST_PIECE:
        left = prefix - start
        unit = max(_LEAST_PIECE, 1 << (left.bit_length() - 3))
        found.append(Piece(start, left // unit * unit))
        start += found[-1].length
    return found


@dataclass(frozen=True)
class DenseChunk:
    """A chunk and where its context lies in the pool.

    Attributes:
        first: the step's token that is its first query.
        queries: how many there are.
        before: tokens of the square in front of the first query.
        square: int32 [N], pool tokens of the square; those behind the last query repeat it.
        prefix: int32 [length] each, pool tokens of the pieces.
    """

    first: int
    queries: int
    before: int
    square: Tensor
    prefix: tuple[Tensor, ...]

    @classmethod
    def of(cls, first: int, queries: int, pages: Tensor) -> DenseChunk:
        """`pages`: int32 [context], pool tokens of the row, its chunk included."""
        prefix = pages.shape[0] - queries
        cut = pieces(prefix)
        before = prefix - sum(piece.length for piece in cut)
        size = -(-(before + queries) // _ROUND) * _ROUND
        square = pages[prefix - before :]
        padding = size - square.shape[0]
        if padding:
            square = torch.cat((square, square[-1:].expand(padding)))
        return cls(first, queries, before, square, tuple(pages[p.start : p.start + p.length] for p in cut))


class DensePrefill:
    """Runs chunks of `least` tokens and more through one library kernel."""

    def __init__(
        self, op: DenseOp = cudnn_attention, merge: Merge = merge_attention, least: int = LEAST_QUERIES
    ) -> None:
        self._op = op
        self._merge = merge
        self.least = least

    def attend(self, chunk: DenseChunk, q: Tensor, kv: PagedKv, scale: float) -> Tensor:
        """Attention of the chunk's queries.

        Args:
            q: [T, heads, D], of the whole step.
            kv: the layer's pool, which holds the chunk's K and V already, in q's dtype.

        Returns: [queries, heads, D]; the heads of a token are contiguous.
        """
        size, before = chunk.square.shape[0], chunk.before
        own = q[chunk.first : chunk.first + chunk.queries]
        if size != chunk.queries:
            padded = q.new_zeros((size, *q.shape[1:]))
            padded[before : before + chunk.queries] = own
            own = padded
        out, lse = self._run(own, kv, chunk.square, causal=True, scale=scale)
        skipped = before // _ROUND * _ROUND
        for pages in chunk.prefix:
            part, part_lse = self._run(own[skipped:], kv, pages, causal=False, scale=scale)
            self._merge(out[skipped:], lse[:, skipped:], part, part_lse)
        return out[before : before + chunk.queries]

    def _run(self, q: Tensor, kv: PagedKv, pages: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """[S, heads, D] and float32 [heads, S]."""
        k, v = (pool.index_select(0, pages).transpose(0, 1)[None] for pool in (kv.k, kv.v))
        out, lse = self._op(q.transpose(0, 1)[None], k, v, causal=causal, scale=scale)
        return out[0].transpose(0, 1), lse[0, ..., 0]
