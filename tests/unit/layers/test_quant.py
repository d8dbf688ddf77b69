"""fp8 matrices: how exact they are, partial blocks and outliers included, and that parts go where they belong."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.fp8_quant import GROUP, fp8_dequant_ref
from inferserve.layers import quant
from inferserve.layers.linear import Linear
from inferserve.layers.quant import FP8, Fp8Scheme, Fp8Weight, QuantisingSlot, quantised

STEP = 1 / 16
"""e4m3 keeps 3 bits after the leading one: half a step is 1/16 of a number at most."""


def filled(weight: torch.Tensor, parts: tuple[int, ...], *, blocks: bool, bias: torch.Tensor | None = None) -> Linear:
    """A packed layer whose parts came one by one."""
    layer = Linear(weight.shape[1], *parts, bias=bias is not None, quant=Fp8Scheme(blocks))
    with torch.inference_mode():
        for part, rows in enumerate(weight.split(parts)):
            layer.slots(part)["weight"].copy_(rows)
            if bias is not None:
                layer.slots(part)["bias"].copy_(bias.split(parts)[part])
        layer.pack()
    return layer


@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("parts", [(256,), (100, 30, 30), (128, 64), (1,)], ids=str)
@pytest.mark.parametrize("inputs", [128, 200, 576])
def test_error_of_a_product(parts: tuple[int, ...], inputs: int, blocks: bool) -> None:
    """Against float64: two rounded factors, errors independent, so 2 × 2.6 % in quadrature; outliers do not add to it."""
    torch.manual_seed(sum(parts) + inputs)
    weight, x, bias = torch.randn(sum(parts), inputs), torch.randn(40, inputs), torch.randn(sum(parts))
    weight[:, 3] *= 60
    x[:, 7] *= 300
    exact = x.double() @ weight.double().T + bias.double()
    out = filled(weight, parts, blocks=blocks, bias=bias).forward(x)
    assert out.dtype == torch.float32
    # Each addend is off by a share of its own size, so the norm of the addends is what errors are held against.
    addends = ((x.double() ** 2) @ (weight.double() ** 2).T).sqrt()
    error = (out.double() - exact).norm() / addends.norm()
    assert 0.005 < error < 0.055, f"{error:.4f}"


@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
def test_every_weight_is_within_half_a_step(blocks: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 300) * torch.logspace(-4, 2, 200)[:, None]
    values, scales = quantised(weight, blocks)
    assert values.dtype == FP8 and values.shape == weight.shape
    assert scales.shape == ((2, 3) if blocks else (200, 1))
    spread = scales.repeat_interleave(GROUP, 0)[:200].repeat_interleave(GROUP, 1)[:, :300] if blocks else scales
    error = (fp8_dequant_ref(values, scales) - weight).abs()
    assert (error <= torch.maximum(weight.abs() * STEP, spread * 2.0**-10) * 1.001).all()


def test_an_outlier_harms_its_block_alone() -> None:
    """In a row of small weights one large one pushes the others below e4m3's normal range: that stays in the block."""
    weight = torch.full((256, 256), 1e-4)
    weight[5, 5] = 1000.0
    values, scales = quantised(weight, True)
    close = (fp8_dequant_ref(values, scales) - weight).abs() <= 1e-5
    assert close[128:].all() and close[:, 128:].all()
    assert not close[:128, :128].all()


def test_blocks_of_parts_start_with_the_part() -> None:
    """A checkpoint's blocks are counted in each part, so that parts of 100 rows need a scale a row when put together."""
    torch.manual_seed(2)
    parts = (100, 130)
    weight = torch.randn(230, 256) * torch.logspace(0, 3, 230)[:, None]
    whole = Fp8Weight(256, parts, Fp8Scheme(blocks=True))
    assert whole.scales.shape == (1 + 2, 2)
    for part, rows in enumerate(weight.split(parts)):
        whole.slots(part)["weight"].copy_(rows)
    expected = torch.cat([fp8_dequant_ref(*quantised(rows, True)) for rows in weight.split(parts)])
    assert torch.equal(fp8_dequant_ref(whole.values, whole.rows_of_scales()), expected)
    aligned = Fp8Weight(256, (128, 256, 7), Fp8Scheme(blocks=True))
    assert aligned.rows_of_scales() is aligned.scales, "3 % more bytes only where there is no other way"


def test_the_gpu_path_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels replaced by their twins: few tokens are quantised in groups, more as the scheme says."""
    from inferserve.kernels.fp8_matmul import QUANTISED_INSIDE, fp8_matmul_ref
    from inferserve.kernels.fp8_quant import fp8_quant_ref

    monkeypatch.setattr(quant, "fp8_matmul", fp8_matmul_ref)
    monkeypatch.setattr(quant, "fp8_quant", fp8_quant_ref)
    torch.manual_seed(3)
    for blocks in (False, True):
        for parts in ((128, 128), (70, 30)):
            weight, bias = torch.randn(sum(parts), 384), torch.randn(sum(parts))
            layer = filled(weight, parts, blocks=blocks, bias=bias)
            assert layer.quantised is not None
            gpu = quant.on_gpu(layer.quantised.values, layer.quantised.rows_of_scales(), bias, blocks)
            for rows in (1, QUANTISED_INSIDE, QUANTISED_INSIDE + 1):
                x = torch.randn(rows, 384)
                exact = rows > QUANTISED_INSIDE or blocks
                tolerance = 1e-5 if exact else 0.1
                wanted = layer.forward(x)
                assert (gpu(x) - wanted).norm() <= tolerance * wanted.norm()


def test_a_quantised_matrix_is_not_multiplied_before_it_is_packed() -> None:
    with pytest.raises(AssertionError, match="pack"):
        Linear(8, 4, quant=Fp8Scheme(blocks=False)).forward(torch.ones(1, 8))


@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
def test_inputs_with_a_mean_are_multiplied_better_once_corrected(blocks: bool) -> None:
    """A few large and steady inputs, as language models have them: the error is that of the rest."""
    torch.manual_seed(4)
    weight, bias = torch.randn(140, 256), torch.randn(140)
    x = torch.randn(200, 256)
    x[:, (3, 77, 200)] = torch.tensor([80.0, -61.0, 99.0])
    exact = x.double() @ weight.double().T + bias.double()
    layer = filled(weight, (100, 40), blocks=blocks, bias=bias)
    assert layer.quantised is not None

    def error() -> float:
        return float((layer.forward(x).double() - exact).norm())

    before = error()
    with torch.inference_mode():
        for part, rows in enumerate(weight.split((100, 40))):
            slot = layer.quantised.slots(part)["weight"]
            assert isinstance(slot, QuantisingSlot)
            slot.correct(rows, layer.quantised.means(x))
    assert error() < 0.5 * before


def test_observers_see_inputs_and_change_nothing() -> None:
    torch.manual_seed(5)
    layer = filled(torch.randn(8, 16), (8,), blocks=False)
    x, seen = torch.randn(3, 16), []
    with layer.observed(seen.append):
        inside = layer.forward(x)
    assert torch.equal(inside, layer.forward(x)) and len(seen) == 1 and seen[0] is x
