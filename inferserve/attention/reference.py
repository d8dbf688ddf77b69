"""`ReferenceAttention`: attention in plain torch; the CPU path, and the yardstick for the kernels on a GPU.

Decode rows of similar length attend together over one gathered copy of their pages. Keys of a decode row may come in
any order, so a row whose pages are a contiguous range needs no copy at all. Prefill chunks attend one row at a time;
a chunk with nothing before it uses the K and V it was given, unless the pool rounds them to 8 bits. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inferserve.attention.base import AttentionBatch, AttentionPlan, LayerSpec
from inferserve.kernels.dispatch import kernels_for
from inferserve.kernels.rope_write import PackedHeads, Rotation, rotated_heads_ref
from inferserve.kv.pool import KvPool

_FREE_PADDING = 256
"""Padding tokens a decode group may always have: about what one more call costs."""


@dataclass(frozen=True)
class Pages:
    """Where the keys of some rows lie: `index` int64 [rows * length], or the range from `start` if it is >= 0."""

    length: int
    start: int
    index: Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that attend in one call.

    Attributes:
        rows: int64 [G], positions among the step's tokens; None = all decode rows in order.
        size: G.
        pages: keys, `pages.length` a row; short rows repeat their last one.
        mask: float [G, 1, 1, length], -inf on repeats; None = no repeats.
    """

    rows: Tensor | None
    size: int
    pages: Pages
    mask: Tensor | None


@dataclass(frozen=True)
class Chunk:
    """One prefill row.

    Attributes:
        start, stop: its tokens of the step.
        pages: its keys; None = exactly the step's own, as they came.
        mask: float [queries, keys], 0 or -inf; None = causal over equally many keys.
    """

    start: int
    stop: int
    pages: Pages | None
    mask: Tensor | None


@dataclass(frozen=True)
class WindowPlan:
    """What a step looks like to the layers of one window size."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class ReferencePlan:
    """A step: index tensors by window size, made when the first layer of that size asks."""

    def __init__(self, batch: AttentionBatch, dtype: torch.dtype, exact: bool = True) -> None:
        """`exact`: the pool holds K and V as they came."""
        self.batch = batch
        self.dtype = dtype
        self._exact = exact
        self._rows = batch.rows.tolist()
        self._query_len = batch.query_len_host.tolist()
        self._kv_len = batch.kv_len_host.tolist()
        self._by_window: dict[int, WindowPlan] = {}

    def window(self, window: int) -> WindowPlan:
        """The plan for layers with this window (0 = none)."""
        if window not in self._by_window:
            self._by_window[window] = WindowPlan(self._decode_groups(window), self._chunks(window))
        return self._by_window[window]

    def _decode_groups(self, window: int) -> tuple[DecodeGroup, ...]:
        lengths = [min(n, window) if window else n for n in self._kv_len[: self.batch.num_decode]]
        return tuple(self._decode_group(members, lengths) for members in group_by_length(lengths))

    def _decode_group(self, members: list[int], lengths: list[int]) -> DecodeGroup:
        batch, longest = self.batch, max(lengths[m] for m in members)
        device = batch.table.device
        everyone = len(members) == batch.num_decode
        rows = None if everyone else torch.tensor(members, device=device)
        if len(members) == 1:
            row = members[0]
            stop = self._kv_len[row]
            return DecodeGroup(rows, 1, self._pages(row, stop - longest, stop, ordered=False), None)
        kv_len = torch.tensor([self._kv_len[m] for m in members], device=device)[:, None]
        used = torch.tensor([lengths[m] for m in members], device=device)[:, None]
        column = torch.arange(longest, device=device)[None, :]
        position = kv_len - used + torch.minimum(column, used - 1)
        table_rows = torch.tensor([self._rows[m] for m in members], device=device)[:, None]
        index = batch.table[table_rows, position].to(torch.int64).flatten()
        mask = None
        if any(lengths[m] != longest for m in members):
            mask = torch.zeros((len(members), longest), dtype=self.dtype, device=device)
            mask = mask.masked_fill_(column >= used, -torch.inf)[:, None, None, :]
        return DecodeGroup(rows, len(members), Pages(longest, -1, index), mask)

    def _chunks(self, window: int) -> tuple[Chunk, ...]:
        batch, chunks, start = self.batch, [], self.batch.num_decode
        for row in range(batch.num_decode, len(self._rows)):
            queries, kv_len = self._query_len[row], self._kv_len[row]
            stop, before = start + queries, kv_len - queries
            first = max(0, before - window + 1) if window else 0
            own = before == 0 and self._exact
            pages = None if own else self._pages(row, first, kv_len, ordered=True)
            causal = before == 0 and (not window or kv_len <= window)
            chunks.append(
                Chunk(start, stop, pages, None if causal else self._chunk_mask(before, kv_len, first, window))
            )
            start = stop
        return tuple(chunks)

    def _chunk_mask(self, before: int, kv_len: int, first: int, window: int) -> Tensor:
        device = self.batch.table.device
        query = torch.arange(before, kv_len, device=device)[:, None]
        key = torch.arange(first, kv_len, device=device)[None, :]
        hidden = key > query
        if window:
            hidden |= key <= query - window
        return torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, -torch.inf)

    def _pages(self, row: int, first: int, stop: int, *, ordered: bool) -> Pages:
        """Positions [first, stop) of a row; `ordered` = the keys must come in the order of their positions."""
        index = self.batch.table[self._rows[row], first:stop].to(torch.int64)
        low, high = (int(end) for end in torch.aminmax(index))
        contiguous = high - low + 1 == stop - first
        if contiguous and (not ordered or bool((index.diff() == 1).all())):
            return Pages(stop - first, low, index)
        return Pages(stop - first, -1, index)


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Split rows into groups whose padding to the longest is at most a quarter of the useful tokens, or little."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    useful = padding = longest = 0
    for i in order:
        added = longest - lengths[i]
        if groups and padding + added <= max(_FREE_PADDING, (useful + lengths[i]) // 4):
            groups[-1].append(i)
            useful, padding = useful + lengths[i], padding + added
        else:
            groups.append([i])
            useful, padding, longest = lengths[i], 0, lengths[i]
    return [sorted(group) for group in groups]


class ReferenceAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, pool: KvPool, device: torch.device) -> None:
        self.pool = pool
        self._write = kernels_for(device).kv_write
        # Gathered keys and values; kept, since fresh megabytes cost more in page faults than the copy itself.
        self._scratch = [torch.empty(0, dtype=pool.dtype, device=device) for _ in range(2)]

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        """See `AttentionBackend`."""
        return ReferencePlan(batch, self.pool.dtype, self.pool.k_scale[0] is None)

    def forward(self, spec: LayerSpec, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, ReferencePlan)
        kv = self.pool.layer(spec.layer)
        self._write(k, v, kv.k, kv.v, plan.batch.kv_index, kv.k_scale, kv.v_scale)
        step = plan.window(spec.window)
        if len(step.groups) == 1 and not step.chunks:
            return self._decode(spec, step.groups[0], q, k.shape[1])
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        for group in step.groups:
            if group.rows is None:
                out[: group.size] = self._decode(spec, group, q[: group.size], k.shape[1])
            else:
                out.index_copy_(0, group.rows, self._decode(spec, group, q.index_select(0, group.rows), k.shape[1]))
        for chunk in step.chunks:
            self._prefill(spec, chunk, q, k, v, out)
        return out

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: Tensor, heads: PackedHeads, rotation: Rotation
    ) -> Tensor:
        """See `AttentionBackend`."""
        return self.forward(spec, plan, *rotated_heads_ref(qkv, heads, rotation))

    def _decode(self, spec: LayerSpec, group: DecodeGroup, q: Tensor, kv_heads: int) -> Tensor:
        """q [G, q_heads, head_dim] → [G, q_heads, value_dim]. The heads that share a KV head act as its queries."""
        keys, values = self._read(spec.layer, group.pages)
        shape = (group.size, group.pages.length, kv_heads, -1)
        out = attend(
            spec,
            q.view(group.size, kv_heads, -1, q.shape[2]),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            group.mask,
        )
        return out.reshape(group.size, q.shape[1], -1)

    def _prefill(self, spec: LayerSpec, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        span = slice(chunk.start, chunk.stop)
        keys, values = (k[span], v[span]) if chunk.pages is None else self._read(spec.layer, chunk.pages)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        result = attend(
            spec,
            q[span].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3),
            keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
            values.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
            chunk.mask,
            causal=chunk.mask is None,
        )
        out[span] = result.permute(2, 0, 1, 3).flatten(1, 2)

    def _read(self, layer: int, pages: Pages) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages`, [n, kv_heads, head_dim] each: views of the pool or of the scratch space, or copies
        out of a pool of 8 bits."""
        kv = self.pool.layer(layer)
        if kv.k_scale is not None:
            keys, values = kv.read(pages.index)
            return keys.to(self.pool.dtype), values.to(self.pool.dtype)
        k, v = kv.k, kv.v
        if pages.start >= 0:
            return k[pages.start : pages.start + pages.length], v[pages.start : pages.start + pages.length]
        return self._gather(0, k, pages.index), self._gather(1, v, pages.index)

    def _gather(self, which: int, source: Tensor, index: Tensor) -> Tensor:
        shape = (index.shape[0], *source.shape[1:])
        need = index.shape[0] * source.shape[1] * source.shape[2]
        if self._scratch[which].numel() < need:
            self._scratch[which] = torch.empty(need * 5 // 4, dtype=source.dtype, device=source.device)
        target = self._scratch[which][:need].view(shape)
        return torch.index_select(source, 0, index, out=target)


def attend(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Softmax attention with the layer's scale and soft cap.

    Args:
        q: [B, H, Q, D]. k: [B, H, N, D]. v: [B, H, N, D'].
        mask: additive, broadcastable to [B, H, Q, N].
        causal: mask the upper triangle (Q == N).

    Returns: [B, H, Q, D'].
    """
    if not spec.softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * spec.scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
