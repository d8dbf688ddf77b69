"""Rotary tables against transformers' own formulas, packed products against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferserve.config.model_config import ModelConfig
from inferserve.kernels.skinny_matmul import MAX_ROWS, skinny_matmul_ref
from inferserve.layers import packed as layout
from inferserve.layers.linear import Linear
from inferserve.layers.packed import FEW_ROWS, few_rows, packed, plain
from inferserve.layers.rotary import attention_factor, inverse_frequencies

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 1.0, "beta_slow": 1.0},
    ],
)
def test_frequencies(rope: dict[str, Any]) -> None:
    settings = {"rope_theta": 500000.0, "original_max_position_embeddings": 1024, **rope}
    if rope["rope_type"] == "linear":
        del settings["original_max_position_embeddings"]
    theirs = transformers.LlamaConfig(**LLAMA, rope_parameters=dict(settings))
    wanted, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    ours = ModelConfig.from_json(LLAMA | {"rope_parameters": settings}).rope
    torch.testing.assert_close(inverse_frequencies(ours, 128), wanted, rtol=1e-6, atol=0.0)
    assert attention_factor(ours) == pytest.approx(scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 65])
def test_packed_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight, offset = torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype) if bias else None
    x = torch.randn(rows, 64, dtype=dtype)
    fast = packed(weight, offset)
    if fast is None:
        pytest.skip("no oneDNN here")
    wanted = plain(weight, offset)(x)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(fast(x), wanted, rtol=tolerance, atol=tolerance)


def test_float16_is_not_packed() -> None:
    assert packed(torch.ones(4, 4, dtype=torch.float16), None) is None


def test_linear_gives_its_weight_up_when_packed() -> None:
    layer = Linear(8, 4, 6, bias=True)
    with torch.inference_mode():
        for part, weight, bias in ((0, 1.0, 0.5), (1, 2.0, 0.0)):
            slots = layer.slots(part)
            slots["weight"].copy_(torch.full(slots["weight"].shape, weight))
            slots["bias"].copy_(torch.full(slots["bias"].shape, bias))
        before = layer.forward(torch.ones(2, 8))
        layer.pack()
        assert torch.equal(layer.forward(torch.ones(2, 8)), before)
    assert before[0].tolist() == [8.5] * 4 + [16.0] * 6


def test_few_rows_take_the_kernel_made_for_them_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spare: torch.Tensor) -> torch.Tensor:
        taken.append(len(x))
        return skinny_matmul_ref(x, weight, bias, spare)

    monkeypatch.setattr(layout, "skinny_matmul", kernel)
    torch.manual_seed(1)
    weight, bias = torch.randn(96, 64), torch.randn(96)
    multiply = few_rows(weight, bias, 8)
    for rows in (1, 8, 9):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(multiply(x), plain(weight, bias)(x))
    assert taken == [1, 8]


def test_the_table_of_few_rows_fits_the_kernel() -> None:
    assert all(0 < entry.rows <= MAX_ROWS for entry in FEW_ROWS)
    assert len({entry[:2] for entry in FEW_ROWS}) == len(FEW_ROWS)
