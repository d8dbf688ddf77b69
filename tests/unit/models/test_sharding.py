"""Each rank reads its share of a checkpoint and nothing else; the shares make up the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inferserve.config.model_config import ModelConfig
from inferserve.errors import ConfigError
from inferserve.layers.quant import Fp8Scheme
from inferserve.models import weights as weights_module
from inferserve.models.decoder import Decoder
from inferserve.models.registry import FAMILIES, load_decoder
from inferserve.models.sharding import Cut, share_of
from inferserve.parallel.ranks import Ranks
from tests.fakes.ranks import SeatedRank, side_by_side
from tests.unit.models.test_gguf_weights import write
from tests.unit.models.test_model_weights import CONFIG, save, tensors

LAYER = "model.layers.1."


def load(folder: Path, rank: int, size: int, *, gguf: str = "", drawn: bool = False, **changes: Any) -> Decoder:
    config = ModelConfig.from_json(CONFIG | changes)
    return load_decoder(
        FAMILIES[config.model_type],
        config,
        folder,
        gguf,
        torch.float16,
        torch.device("cpu"),
        max_len=32,
        drawn=drawn,
        ranks=SeatedRank(rank, size),
    )


def shares(folder: Path, size: int, **options: Any) -> list[Decoder]:
    return [load(folder, rank, size, **options) for rank in range(size)]


def rows_of(part: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return part.chunk(size)[rank].half()


def test_two_halves(tmp_path: Path) -> None:
    whole = tensors()
    for rank, model in enumerate(shares(save(tmp_path, whole), 2)):
        attention, mlp = model.layers[1].attention, model.layers[1].mlp
        qkv = [rows_of(whole[f"{LAYER}self_attn.{name}_proj.weight"], rank, 2) for name in "qkv"]
        gate_up = [rows_of(whole[f"{LAYER}mlp.{name}_proj.weight"], rank, 2) for name in ("gate", "up")]
        assert torch.equal(attention.qkv.weight, torch.cat(qkv))
        assert torch.equal(mlp.gate_up.weight, torch.cat(gate_up))
        assert torch.equal(attention.out.weight, whole[f"{LAYER}self_attn.o_proj.weight"].chunk(2, 1)[rank].half())
        assert torch.equal(mlp.down.weight, whole[f"{LAYER}mlp.down_proj.weight"].chunk(2, 1)[rank].half())
        assert torch.equal(model.embedding.weight, rows_of(whole["model.embed_tokens.weight"], rank, 2))
        assert torch.equal(model.head.weight, rows_of(whole["lm_head.weight"], rank, 2))
        assert torch.equal(model.norm.weight, whole["model.norm.weight"].half())
        assert model.kv_shapes[0].kv_heads == 1


def test_kv_heads_are_repeated_where_there_are_more_ranks(tmp_path: Path) -> None:
    whole = tensors()
    for rank, model in enumerate(shares(save(tmp_path, whole), 4)):
        q, k, v = model.layers[0].attention.qkv.weight.split(model.layers[0].attention.sizes)
        assert torch.equal(q, rows_of(whole["model.layers.0.self_attn.q_proj.weight"], rank, 4))
        assert torch.equal(k, rows_of(whole["model.layers.0.self_attn.k_proj.weight"], rank // 2, 2))
        assert torch.equal(v, rows_of(whole["model.layers.0.self_attn.v_proj.weight"], rank // 2, 2))


def test_biases_behind_a_sum_are_the_leader_s(tmp_path: Path) -> None:
    whole = tensors()
    for i in range(2):
        whole |= {f"model.layers.{i}.self_attn.{name}_proj.bias": torch.randn(16) for name in "qo"}
        whole |= {f"model.layers.{i}.self_attn.{name}_proj.bias": torch.randn(8) for name in "kv"}
        whole |= {f"model.layers.{i}.mlp.{name}_proj.bias": torch.randn(24) for name in ("gate", "up")}
        whole[f"model.layers.{i}.mlp.down_proj.bias"] = torch.randn(16)
    models = shares(save(tmp_path, whole), 2, attention_bias=True, mlp_bias=True)
    for rank, model in enumerate(models):
        layer = model.layers[1]
        biases = [rows_of(whole[f"{LAYER}self_attn.{name}_proj.bias"], rank, 2) for name in "qkv"]
        assert torch.equal(layer.attention.qkv.bias, torch.cat(biases))
        added = 1 - rank
        assert torch.equal(layer.attention.out.bias, added * whole[f"{LAYER}self_attn.o_proj.bias"].half())
        assert torch.equal(layer.mlp.down.bias, added * whole[f"{LAYER}mlp.down_proj.bias"].half())


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_cannot_be_divided_is_padded(tmp_path: Path, tied: bool) -> None:
    whole = tensors()
    whole |= {name: torch.randn(41, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    first, last = shares(save(tmp_path, whole), 2, vocab_size=41, tie_word_embeddings=tied)
    head = whole["model.embed_tokens.weight" if tied else "lm_head.weight"].half()
    for module in (first.head, first.embedding, last.head, last.embedding):
        assert module.weight.shape == (21, 16)
        assert torch.isfinite(module.weight).all()
    assert torch.equal(torch.cat((first.head.weight, last.head.weight[:20])), head)
    assert not last.head.weight[20].any()


def test_only_the_share_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    opened = weights_module._opened

    class Noting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *ends: Any) -> None:
            self._file.__exit__(*ends)

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read[name] = self._file.get_tensor(name).numel()
            return self._file.get_tensor(name)

        def get_slice(self, name: str) -> Any:
            return NotingSlice(name, self._file.get_slice(name))

    class NotingSlice:
        def __init__(self, name: str, stored: Any) -> None:
            self._name, self._stored = name, stored

        def get_shape(self) -> list[int]:
            return self._stored.get_shape()

        def __getitem__(self, index: Any) -> torch.Tensor:
            part = self._stored[index]
            read[self._name] = part.numel()
            return part

    monkeypatch.setattr(weights_module, "_opened", lambda path: Noting(opened(path)))
    whole = tensors()
    load(save(tmp_path, whole), 1, 2)
    for name, tensor in whole.items():
        assert read[name] == tensor.numel() // (2 if tensor.dim() == 2 else 1), name


def test_gguf_gives_the_same_shares(tmp_path: Path) -> None:
    whole = tensors()
    path = write(tmp_path / "m.gguf", whole)
    save(tmp_path, whole)
    for size in (2, 4):
        for rank in range(size):
            one, other = load(tmp_path, rank, size), load(tmp_path, rank, size, gguf=str(path))
            for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(mine, theirs), name


def test_drawn_weights_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    whole = load(tmp_path, 0, 1, drawn=True)
    halves = shares(tmp_path, 2, drawn=True)
    joined = torch.cat([half.layers[1].mlp.down.weight for half in halves], 1)
    assert torch.equal(joined, whole.layers[1].mlp.down.weight)
    assert torch.equal(torch.cat([half.head.weight for half in halves]), whole.head.weight)


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 3), ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}, 2), ({"intermediate_size": 25}, 2)],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, changes: dict[str, Any], size: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp {size}"):
        load(tmp_path, 0, size, drawn=True, **changes)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    whole = tensors()
    whole["lm_head.weight"] = torch.zeros(39, 16)
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight is \(39, 16\)"):
        load(save(tmp_path, whole), 1, 2)


def shapes_and_slots(scale: str, whole: dict[str, tuple[int, int]], own: dict[str, tuple[int, int]]) -> tuple[Any, Any]:
    names = {"w.weight": "weight", f"w.{scale}": "scale"}
    return (
        {name: torch.Size(whole[kind]) for name, kind in names.items()},
        {name: torch.empty(own[kind]) for name, kind in names.items()},
    )


def test_scales_of_blocks_are_cut_with_their_weights() -> None:
    shapes, own = shapes_and_slots(
        "weight_scale_inv", {"weight": (512, 256), "scale": (4, 2)}, {"weight": (256, 256), "scale": (2, 2)}
    )
    share = share_of(shapes, own, SeatedRank(1, 2), "weight_scale_inv")
    assert share.cuts == {"w.weight": Cut(0, 256, 512, 512), "w.weight_scale_inv": Cut(0, 2, 4, 4)}


def test_blocks_that_would_be_torn_are_refused() -> None:
    shapes, own = shapes_and_slots(
        "weight_scale_inv", {"weight": (384, 256), "scale": (3, 2)}, {"weight": (192, 256), "scale": (2, 2)}
    )
    with pytest.raises(ConfigError, match=r"--tp 2: w\.weight would be cut into 192"):
        share_of(shapes, own, SeatedRank(1, 2), "weight_scale_inv")


@pytest.mark.parametrize("blocks", [True, False])
def test_quantised_at_load(tmp_path: Path, blocks: bool) -> None:
    """Scales are those of the share: the product of a rank is as good as it would be alone."""
    whole = tensors()
    save_file(whole, tmp_path / "model.safetensors")
    config = ModelConfig.from_json(CONFIG)

    def loaded(ranks: Ranks) -> Decoder:
        """Both at once: the biases that take rounding errors back come of a forward of all ranks."""
        cpu, quant = torch.device("cpu"), Fp8Scheme(blocks)
        return load_decoder(
            FAMILIES["llama"], config, tmp_path, "", torch.float32, cpu, max_len=32, quant=quant, ranks=ranks
        )

    for rank, model in enumerate(side_by_side(2, loaded)):
        out = model.layers[0].attention.out.quantised
        wanted = whole["model.layers.0.self_attn.o_proj.weight"].chunk(2, 1)[rank]
        assert out is not None and out.values.shape == wanted.shape
        restored = out.values.float() * out.scales
        assert (restored - wanted).abs().max() < 0.07 * wanted.abs().max()
