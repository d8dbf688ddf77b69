"""`TritonAttention` against the reference backend on whole steps."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import Bucket, LayerSpec
from inferserve.attention.dense import DensePrefill
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.kernels.merge_attention import merge_attention_ref
from inferserve.kv.pool import KvPool, KvShape
from tests.fakes.dense_attention import torch_attention
from tests.fakes.paged import among_strangers, paged_step, planned
from tests.kernels.compare import DTYPES, assert_matches

STEPS = {
    "decode only": [(1, 5), (1, 300), (1, 1)],
    "prefill only": [(30, 30), (9, 50)],
    "both": [(1, 280), (1, 2), (40, 40), (3, 90)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [LayerSpec(0, 0.2), LayerSpec(0, 0.2, window=20, softcap=4.0)], ids=["plain", "window, cap"]
)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("bucket", [None, Bucket(64, 6, 3)], ids=["sized to the rows", "sized to a bucket"])
def test_a_step(
    bucket: Bucket | None, rows: list[tuple[int, int]], spec: LayerSpec, dtype: torch.dtype, device: torch.device
) -> None:
    outs = []
    for backend in (TritonAttention, lambda pool: ReferenceAttention(pool, device)):
        step = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
        attention = backend(step.pool)
        outs.append(attention.forward(spec, planned(attention, step, bucket), step.q, step.k, step.v))
        assert torch.equal(step.pool.k[0][step.batch.kv_index], step.k)
        assert torch.equal(step.pool.v[0][step.batch.kv_index], step.v)
    assert_matches(outs[0], outs[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [LayerSpec(0, 0.2), LayerSpec(0, 0.2, window=20, softcap=4.0)], ids=["plain", "window, cap"]
)
def test_nothing_of_other_rows_is_read(spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Not even with weight 0: freed places keep what they held, and 0 x NaN is NaN."""
    rows = STEPS["both"]
    whole = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
    attention = TritonAttention(whole.pool)
    together = attention.forward(spec, planned(attention, whole), whole.q, whole.k, whole.v)
    for row in range(len(rows)):
        step = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
        alone, tokens = among_strangers(step, row)
        attention = TritonAttention(alone.pool)
        out = attention.forward(spec, planned(attention, alone), alone.q, alone.k, alone.v)
        assert torch.equal(out[tokens], together[tokens])


@pytest.mark.parametrize("rows", [*STEPS.values(), [(40, 90)], [(1, 9), (256, 1400)]], ids=str)
def test_long_chunks_go_through_a_dense_kernel(rows: list[tuple[int, int]], device: torch.device) -> None:
    outs, calls = [], []

    def counted(*args: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(causal)
        return torch_attention(*args, causal=causal, scale=scale)

    dense = DensePrefill(counted, merge_attention_ref, least=30)
    for backend in (lambda pool: TritonAttention(pool, dense=dense), lambda pool: ReferenceAttention(pool, device)):
        step = paged_step(rows, KvShape(3, 32, group=2), 6, device=device)
        attention = backend(step.pool)
        outs.append(attention.forward(LayerSpec(0, 0.2), planned(attention, step), step.q, step.k, step.v))
    assert_matches(outs[0], outs[1], torch.float32)
    assert calls.count(True) == sum(queries >= dense.least for queries, _ in rows)
    assert calls.count(False) == sum(queries >= dense.least and length - queries >= 1024 for queries, length in rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_step_over_8_bits(stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    outs = []
    for backend in (TritonAttention, lambda pool: ReferenceAttention(pool, device)):
        step = paged_step(STEPS["both"], KvShape(3, 32), 6, dtype=dtype, device=device, stored=stored)
        attention = backend(step.pool)
        outs.append(attention.forward(LayerSpec(0, 0.2), planned(attention, step), step.q, step.k, step.v))
    assert_matches(outs[0], outs[1], dtype)


def test_layers_of_different_heads(device: torch.device) -> None:
    """Each has its own work list, also in a bucket."""
    shapes = (KvShape(3, 32, group=2), KvShape(2, 32, group=4), KvShape(3, 32, group=2))
    for bucket in (None, Bucket(64, 6, 3)):
        for layer in range(3):
            shape = shapes[layer]
            step = paged_step(STEPS["both"], shape, shape.kv_heads * shape.group, device=device)
            one = step.pool
            pool = KvPool(shapes, one.tokens, torch.float32, device)
            pool.k[layer], pool.v[layer] = one.k[0].clone(), one.v[0].clone()
            attention, reference = TritonAttention(pool), ReferenceAttention(one, device)
            assert bucket is None or len(attention.work(step.host_rows, bucket)) == attention.work_size(bucket)
            out = attention.forward(LayerSpec(layer, 0.2), planned(attention, step, bucket), step.q, step.k, step.v)
            ref = reference.forward(LayerSpec(0, 0.2), planned(reference, step), step.q, step.k, step.v)
            assert_matches(out, ref, torch.float32)
