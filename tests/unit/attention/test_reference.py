"""`ReferenceAttention` against the definition of attention in float64."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import LayerSpec
from inferserve.attention.reference import ReferenceAttention, group_by_length
from inferserve.attention.registry import make_attention
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvShape
from tests.fakes.paged import PagedStep, among_strangers, expected_attention, paged_step

SHAPE = KvShape(kv_heads=2, head_dim=16)
STEPS = {
    "one decode row": [(1, 9)],
    "first token": [(1, 1), (1, 1)],
    "equal decode rows": [(1, 12)] * 4,
    "ragged decode rows": [(1, n) for n in (3, 40, 7, 1, 90)],
    "decode rows too ragged for one group": [(1, n) for n in (3, 700, 5, 650)],
    "one prompt": [(17, 17)],
    "chunk over a prefix": [(7, 30)],
    "everything": [(1, 5), (1, 700), (1, 6), (9, 9), (6, 25), (2, 2)],
}


def run(step: PagedStep, spec: LayerSpec) -> torch.Tensor:
    backend = ReferenceAttention(step.pool, torch.device("cpu"))
    return backend.forward(spec, backend.plan(step.batch), step.q, step.k, step.v)


@pytest.mark.parametrize("layout", ["shuffled", "descending", "contiguous"])
@pytest.mark.parametrize("window", [0, 1, 8])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_equals_the_definition(rows: list[tuple[int, int]], window: int, layout: str) -> None:
    step = paged_step(rows, SHAPE, 6, layout=layout)
    expected = expected_attention(step, scale=0.3, window=window)
    out = run(step, LayerSpec(0, 0.3, window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("layout", ["shuffled", "contiguous"])
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_equals_the_definition_over_8_bits(
    rows: list[tuple[int, int]], window: int, layout: str, stored: torch.dtype
) -> None:
    step = paged_step(rows, SHAPE, 6, layout=layout, stored=stored)
    expected = expected_attention(step, scale=0.3, window=window)
    out = run(step, LayerSpec(0, 0.3, window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 8])
def test_softcap(window: int) -> None:
    step = paged_step(STEPS["everything"], SHAPE, 6)
    expected = expected_attention(step, scale=1.0, window=window, softcap=2.0)
    out = run(step, LayerSpec(0, 1.0, window, softcap=2.0))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_values_may_have_another_size() -> None:
    step = paged_step(STEPS["everything"], KvShape(2, 16, 24), 4)
    torch.testing.assert_close(
        run(step, LayerSpec(0, 0.25)).double(), expected_attention(step, scale=0.25), rtol=1e-5, atol=1e-5
    )


def test_writes_the_steps_keys_and_values() -> None:
    step = paged_step(STEPS["everything"], SHAPE, 6)
    before = step.pool.k[0].clone()
    run(step, LayerSpec(0, 0.3))
    assert torch.equal(step.pool.k[0][step.batch.kv_index], step.k)
    assert torch.equal(step.pool.v[0][step.batch.kv_index], step.v)
    others = torch.ones(step.pool.tokens + 1, dtype=torch.bool)
    others[step.batch.kv_index] = False
    torch.testing.assert_close(step.pool.k[0][others], before[others], equal_nan=True)


def test_one_plan_serves_layers_with_different_windows() -> None:
    step = paged_step(STEPS["everything"], SHAPE, 6)
    backend = ReferenceAttention(step.pool, torch.device("cpu"))
    plan = backend.plan(step.batch)
    for window in (0, 8, 0, 3):
        out = backend.forward(LayerSpec(0, 0.3, window), plan, step.q, step.k, step.v)
        expected = expected_attention(step, scale=0.3, window=window)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_rows_nan_stays_its_own() -> None:
    step = paged_step([(1, 30), (1, 31), (1, 32), (4, 9)], SHAPE, 6)
    step.v[1] = torch.nan
    out = run(step, LayerSpec(0, 0.3))
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("layout", ["shuffled", "descending", "contiguous"])
@pytest.mark.parametrize(
    "spec", [LayerSpec(0, 0.3), LayerSpec(0, 0.3, window=8), LayerSpec(0, 0.3, softcap=2.0)], ids=str
)
def test_nothing_of_other_rows_is_read(spec: LayerSpec, layout: str) -> None:
    """Not even with weight 0: freed places keep what they held, and 0 x NaN is NaN."""
    rows = STEPS["everything"]
    together = run(paged_step(rows, SHAPE, 6, layout=layout), spec)
    for row in range(len(rows)):
        alone, tokens = among_strangers(paged_step(rows, SHAPE, 6, layout=layout), row)
        torch.testing.assert_close(run(alone, spec)[tokens], together[tokens], rtol=1e-6, atol=1e-6)


def test_groups_bound_their_padding() -> None:
    lengths = [1000, 10, 990, 12, 5000, 4000]
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert [2, 0] not in groups and [0, 2] in groups
    for group in groups:
        useful = sum(lengths[i] for i in group)
        assert max(lengths[i] for i in group) * len(group) - useful <= max(256, useful // 4)


def test_names() -> None:
    step = paged_step([(1, 2)], SHAPE, 6)
    cpu = torch.device("cpu")
    assert isinstance(make_attention("reference", step.pool, cpu), ReferenceAttention)
    for name in ("triton", "flash", "auto"):
        with pytest.raises(ConfigError, match=name):
            make_attention(name, step.pool, cpu)
