"""Which model runs how: our own stack for the families in the table, transformers for every other decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from inferserve.config.model_config import ModelConfig
from inferserve.config.native import obstacle
from inferserve.config.quantization import BLOCK
from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError
from inferserve.layers.quant import Fp8Scheme
from inferserve.models import llama, mistral, qwen2, qwen3
from inferserve.models.bias_correction import CALIBRATION_TOKENS, correct_biases
from inferserve.models.decoder import Decoder
from inferserve.models.dummy_weights import RandomTensors
from inferserve.models.family import Family
from inferserve.models.gguf_weights import ROPE_FACTORS, GgufFile
from inferserve.models.sharding import NO_CUTS, share_of
from inferserve.models.spec import CausalModel, DecoderSpec
from inferserve.models.upload import uploader
from inferserve.models.weights import Destinations, Safetensors, destinations, load
from inferserve.parallel.ranks import ALONE, Ranks

FAMILIES = {family.model_type: family for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}

_FP8_SINCE = (8, 9)
"""Compute capability."""
_IGNORED: tuple[str, ...] = ("rotary_emb.inv_freq",)


def read_model_config(folder: Path) -> ModelConfig:
    """The folder's config.json. Raises ConfigError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return ModelConfig.from_json(raw)


def family_of(config: ModelConfig, model_backend: str) -> Family | None:
    """The family whose stack runs this model, or None for transformers.

    Raises ConfigError when `model_backend` is native and our stack cannot run it.
    """
    if model_backend == "transformers":
        return None
    reason = obstacle(config)
    if reason and model_backend == "native":
        raise ConfigError(f"--model-backend native: {reason}")
    return None if reason else FAMILIES[config.model_type]


def load_model(config: ServerConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE) -> CausalModel:
    """Build the model, or the share of it that a rank holds, and fill it. Raises ConfigError naming file, tensor or flag."""
    folder, facts = Path(config.facts.folder), config.facts
    model_config = read_model_config(folder)
    family = family_of(model_config, config.engine.model_backend)
    drawn = config.model.load_format == "dummy"
    if family is not None:
        return load_decoder(
            family,
            model_config,
            folder,
            facts.gguf_file,
            dtype,
            device,
            max_len=config.model.max_req_total_len,
            drawn=drawn,
            quant=quant_scheme(config, model_config),
            ranks=ranks,
            ordered=config.engine.deterministic,
        )
    from inferserve.models import generic  # imports transformers' modelling code, which takes seconds

    return generic.build(
        folder,
        facts.gguf_file,
        dtype,
        device,
        max_len=config.model.max_req_total_len,
        trust_remote_code=config.model.trust_remote_code,
        drawn=drawn,
    )


def quant_scheme(config: ServerConfig, model_config: ModelConfig) -> Fp8Scheme | None:
    """As the checkpoint is stored, else as the flag says. Drawn weights are floats in any case."""
    stored, drawn = model_config.quantization, config.model.load_format == "dummy"
    if config.engine.deterministic and (stored is not None or config.model.quant_type != "none"):
        raise ConfigError("--deterministic: products with fp8 weights depend on the number of rows; use float weights")
    kind = stored.quant_type if stored else config.model.quant_type
    return None if kind == "none" else Fp8Scheme(kind == BLOCK, stored.scale if stored and not drawn else "")


def load_decoder(
    family: Family,
    config: ModelConfig,
    folder: Path,
    gguf_file: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_len: int,
    drawn: bool = False,
    quant: Fp8Scheme | None = None,
    ranks: Ranks = ALONE,
    ordered: bool = False,
) -> Decoder:
    """Our stack, or a rank's share of it, filled from `folder`, `gguf_file` or a random generator (`drawn`), ready for positions below `max_len`."""
    if quant and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_SINCE:
        raise ConfigError(f"fp8 weights: {torch.cuda.get_device_name(device)} has no fp8 matrix units")
    spec = replace(family.spec(config), quant=quant)
    with _defaults(dtype, device):
        model = Decoder(spec, ranks)
    wanted = dict(destinations(model, family.names, spec.layers))
    shapes = {name: slot.shape for name, slot in wanted.items()}
    cuts = NO_CUTS
    ignored = _IGNORED
    if spec.tied:
        del wanted["lm_head.weight"], shapes["lm_head.weight"]
        ignored = (*_IGNORED, "lm_head.weight")
    if ranks.size > 1:
        shapes = _whole_shapes(family, spec, tuple(wanted))
        share = share_of(shapes, wanted, ranks, quant.leaf if quant and quant.blocks else "")
        wanted, cuts, ignored = share.own, share.cuts, (*ignored, *share.elsewhere)
    source = RandomTensors(shapes, dtype, device) if drawn else _checkpoint(family, spec, folder, gguf_file, wanted)
    optional = {ROPE_FACTORS: model.rotary.freq_factors} if isinstance(source, GgufFile) else {}
    with torch.inference_mode(), uploader(device) if device.type == "cuda" else nullcontext() as upload:
        load(source, wanted, optional, ignored, cuts, upload)
        model.prepare(max_len, device, ordered)
        if quant and not quant.leaf:
            correct_biases(model, source, wanted, cuts, min(max_len, CALIBRATION_TOKENS), device, upload)
    return model


def _checkpoint(
    family: Family, spec: DecoderSpec, folder: Path, gguf_file: str, wanted: Destinations
) -> Safetensors | GgufFile:
    if not gguf_file:
        return Safetensors(folder)
    pairs = (spec.heads, spec.kv_heads) if family.gguf_rotary_pairs else None
    return GgufFile(Path(gguf_file), wanted, layers=spec.layers, rotary_pairs=pairs)


def _whole_shapes(family: Family, spec: DecoderSpec, names: tuple[str, ...]) -> dict[str, torch.Size]:
    """Shapes of the whole model's tensors, without making one."""
    with torch.device("meta"):
        slots = destinations(Decoder(spec), family.names, spec.layers)
    return {name: slots[name].shape for name in names}


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Parameters made inside are of this dtype and on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
