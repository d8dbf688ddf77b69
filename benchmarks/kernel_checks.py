"""Checks of the GPU kernels in bf16: each against its torch twin, on fresh random ragged data with poisoned outputs.

Every check is a name and a function that returns a relative error; `kernels_gpu` runs them, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.kernel_inputs import BF16, DEVICE, Attention, make_pages, poison, ragged, random, step_batch
from inferserve.attention.base import Bucket, HostRows, LayerSpec
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.kernels import activation, argmax, norm, rope_write
from inferserve.kernels.paged_kv import Scores
from inferserve.kv.pool import KvPool, KvShape

TOLERANCE = 1e-2
"""Largest ||out - ref|| / ||ref|| in bf16: a rounding of the operands and one of the result."""

Check = tuple[str, Callable[[], float]]

_HEADS = ((32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 8, 80), (24, 8, 96), (8, 1, 256), (28, 4, 128))
_STORED = {"bf16": BF16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_REPEATS = 200


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Of the whole tensor; infinite if anything is not a number."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm()) if bool(out.isfinite().all()) else float("inf")


def checks() -> Iterator[Check]:
    """All of them, those that matter most first."""
    for heads, kv_heads, head_dim in _HEADS:
        shape = KvShape(kv_heads, head_dim, group=heads // kv_heads)
        plain = Scores(head_dim**-0.5)
        for stored in _STORED if (heads, head_dim) in ((32, 128), (9, 64)) else ("bf16",):
            yield f"attention {heads}/{kv_heads} x {head_dim}, {stored}", partial(_mixed, shape, plain, stored)
    shape = KvShape(8, 128, group=4)
    yield "window 200", partial(_mixed, shape, Scores(0.09, window=200), "bf16")
    yield "window 3000", partial(_mixed, shape, Scores(0.09, window=3000), "bf16")
    yield "softcap 20", partial(_mixed, shape, Scores(0.09, softcap=20.0), "bf16")
    yield "window 1000, softcap 20, fp8", partial(_mixed, shape, Scores(0.09, 1000, 20.0), "fp8")
    yield "joined stretches are the same 200 times", _repeated
    yield "deterministic: alone as among others", _alone
    yield "a captured launch serves other steps", _captured
    yield "backend, mixed step", partial(_backend, BF16)
    yield "backend, mixed step, fp8", partial(_backend, torch.float8_e4m3fn)
    yield "rms_norm", _rms_norm
    yield "fused_add_rms_norm", _add_norm
    yield "silu_mul", _silu
    yield "rope_write", partial(_rope_write, BF16)
    yield "rope_write, fp8", partial(_rope_write, torch.float8_e4m3fn)
    yield "argmax", _argmax


def _mixed(shape: KvShape, scores: Scores, stored: str) -> float:
    lengths = [*ragged(23, 1, 1400), (1, 9000), (300, 300), (5, 900), (129, 777), (1, 1), (256, 3512)]
    attention = Attention.over(make_pages(lengths, shape, stored=_STORED[stored]), scores)
    return error(attention.both(), attention.both(twin=True))


def _repeated() -> float:
    """Many rows in many stretches, bit for bit: a race in the joining would show."""
    attention = Attention.over(make_pages(ragged(20, 2000, 9000), KvShape(8, 128, group=4)), Scores(0.09))
    first = attention.both()
    same = [bool(torch.equal(attention.both(), first)) for _ in range(_REPEATS)]
    return error(first, attention.both(twin=True)) if all(same) else float("inf")


def _alone() -> float:
    pages = make_pages(ragged(40, 1, 9000), KvShape(8, 128, group=4))
    together = Attention.over(pages, Scores(0.09), deterministic=True)
    expected = together.both()
    for row in range(0, 40, 7):
        own = slice(row, row + 1)
        rows = HostRows(pages.rows.rows[own], 1, pages.rows.query_len[own], pages.rows.kv_len[own])
        alone = Attention.over(replace(pages, rows=rows), Scores(0.09), deterministic=True)
        alone.q.copy_(together.q[own])
        if not torch.equal(alone.both()[0], expected[row]):
            return float("inf")
    return 0.0


def _captured() -> float:
    """One graph, replayed with the work lists of other steps."""
    lengths = [*ragged(60, 1, 3000), (1, 9000), (200, 200), (150, 5000), (5, 70)]
    pages = make_pages(lengths, KvShape(8, 128, group=4))
    attention, bucket = TritonAttention(pages.pool), Bucket(448, 72, 6)
    batch = step_batch(pages, bucket.tokens, attention, bucket)
    q, kv = random(bucket.tokens, 32, 128), random(bucket.tokens, 8, 128)
    attention.forward(LayerSpec(0, 0.09), attention.plan(batch), q, kv, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.forward(LayerSpec(0, 0.09), attention.plan(batch), q, kv, kv)
    worst = 0.0
    for first, stop in ((0, 64), (0, 61), (30, 64), (61, 64), (60, 61), (0, 64)):
        kept = slice(first, stop)
        rows = HostRows(
            pages.rows.rows[kept], max(0, min(stop, 61) - first), pages.rows.query_len[kept], pages.rows.kv_len[kept]
        )
        assert batch.work is not None
        batch.work.copy_(torch.from_numpy(attention.work(rows, bucket)))
        out.fill_(torch.nan)
        graph.replay()
        tokens = int(rows.query_len.sum())
        twin = Attention.over(replace(pages, rows=rows), Scores(0.09))
        twin.q.copy_(q[:tokens])
        worst = max(worst, error(out[:tokens], twin.both(twin=True)))
    return worst


def _backend(stored: torch.dtype) -> float:
    lengths = [*ragged(9, 1, 600), (64, 64), (17, 400), (9, 9)]
    pages = make_pages(lengths, KvShape(8, 128, group=4), stored=stored)
    rows, tokens = pages.rows, pages.tokens
    q, k, v = random(tokens, 32, 128), random(tokens, 8, 128), random(tokens, 8, 128)
    owners = zip(rows.rows.tolist(), rows.query_len.tolist(), rows.kv_len.tolist(), strict=True)
    index = torch.cat([pages.table[row, n - m : n] for row, m, n in owners]).long()
    triton, reference = TritonAttention(pages.pool), ReferenceAttention(pages.pool, DEVICE)
    batch = step_batch(pages, tokens, triton, None)
    full = replace(
        batch,
        rows=torch.from_numpy(rows.rows).to(DEVICE),
        num_decode=rows.num_decode,
        kv_index=index,
        kv_len=torch.from_numpy(rows.kv_len).to(DEVICE),
    )
    spec = LayerSpec(0, 0.09)
    out = triton.forward(spec, triton.plan(full), q, k, v)
    return error(out, reference.forward(spec, reference.plan(full), q, k, v))


def _rms_norm() -> float:
    worst = 0.0
    for shape in ((1, 576), (37, 4096), (5, 9, 64), (7, 32, 128)):
        x, weight = random(*shape), random(shape[-1])
        poison()
        worst = max(worst, error(norm.rms_norm(x, weight, 1e-5), norm.rms_norm_ref(x, weight, 1e-5)))
    return worst


def _add_norm() -> float:
    x, residual, weight = random(129, 4096), random(129, 4096), random(4096)
    poison()
    pairs = zip(norm.fused_add_rms_norm(x, residual.clone(), weight, 1e-5), norm.fused_add_rms_norm_ref(x, residual.clone(), weight, 1e-5), strict=True)  # fmt: skip
    return max(error(out, ref) for out, ref in pairs)


def _silu() -> float:
    gate_up = random(67, 2 * 14336)
    poison()
    return error(activation.silu_mul(gate_up), activation.silu_mul_ref(gate_up))


def _rope_write(stored: torch.dtype) -> float:
    """Queries; and the pool as the reference wrote it."""
    worst = 0.0
    for normed in (False, True):
        angle = 9 * random(500, 64, dtype=torch.float32)
        rotation = rope_write.Rotation(angle.cos(), angle.sin(), torch.randint(500, (33,), device=DEVICE))
        weights = (random(128), random(128), 1e-6) if normed else ()
        heads = rope_write.PackedHeads(32, 8, 128, *weights)
        qkv, index = random(33, 48 * 128), torch.randperm(900, device=DEVICE)[:33]
        pools = [KvPool((KvShape(8, 128, group=4),), 999, BF16, DEVICE, stored) for _ in range(2)]
        outs = []
        for op, pool in zip((rope_write.rope_write, rope_write.rope_write_ref), pools, strict=True):
            kv = pool.layer(0)
            outs.append((op(qkv, heads, rotation, kv.k, kv.v, index, kv.k_scale, kv.v_scale), *kv.read(index)))
        limit = 1.0 if stored == BF16 else 0.25  # a rounding the other way moves an 8-bit number by one step
        worst = max(
            worst, *(error(out, ref) * (limit if i else 1.0) for i, (out, ref) in enumerate(zip(*outs, strict=True)))
        )
    return worst


def _argmax() -> float:
    for rows in (1, 96):
        logits = random(rows, 151936, dtype=torch.float32)  # in 16 bits the largest is rarely alone
        outs, refs = argmax.argmax(logits), argmax.argmax_ref(logits)
        if not all(torch.equal(out.long(), ref.long()) for out, ref in zip(outs, refs, strict=True)):
            return float("inf")
    return 0.0
