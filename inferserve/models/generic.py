"""Any other decoder that transformers can build, with our paged attention in place of its own.

transformers lets an attention function be registered by name; models hand it q, k and v of one layer and pass keyword
arguments of their forward on to it. A step is one packed row [1, T] with position ids; the function finds the step in
its keyword `paged`. A dry run at start (`generic_probe`) learns each layer's heads and refuses what would come out wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inferserve.attention.base import LayerSpec
from inferserve.errors import ConfigError
from inferserve.layers.context import ForwardContext
from inferserve.models.dummy_weights import SEED
from inferserve.models.generic_probe import Call, Paged, probe, rope_kinds

_NAME = "inferserve_paged"
_REFUSED = ("s_aux", "position_bias", "alibi", "attention_bias", "head_mask", "sinks")


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: Paged | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function: [1, heads, T, dim] → [1, T, heads, dim]."""
    if paged is None:
        raise ConfigError("this model does not pass keyword arguments on to its attention")
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    refused += ["its own mask"] if attention_mask is not None else []
    refused += [] if kwargs.get("is_causal", getattr(module, "is_causal", True)) in (True, None) else ["no causality"]
    spec = LayerSpec(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
    )
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return paged.attend(Call(spec, tuple(refused)), q, k, v)[None], None


@dataclass(frozen=True)
class _Step:
    """Sends a layer's q, k and v to the attention backend of a step."""

    ctx: ForwardContext

    def attend(self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See Paged."""
        return self.ctx.attention.forward(call.spec, self.ctx.plan, q, k, v)


class GenericModel:
    """A `CausalModel` (see `spec`) around a transformers model."""

    def __init__(self, model: Any) -> None:
        """Dry-run `model`. Raises ConfigError with the reasons if it cannot run on paged attention."""
        self._model = model
        dry = probe(model, self._probed, _NAME)
        self.layer_specs = tuple(call.spec for call in sorted(dry.calls, key=lambda call: call.spec.layer))
        self.kv_shapes = tuple(dry.shapes[spec.layer] for spec in self.layer_specs)

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See CausalModel."""
        positions = ctx.batch.positions[None]
        return self._forward(token_ids[None], positions, ctx.logits_index, _Step(ctx))

    @torch.inference_mode()
    def _probed(self, ids: torch.Tensor, positions: torch.Tensor, paged: Paged) -> torch.Tensor:
        return self._forward(ids[None], positions[None], torch.arange(len(ids), device=ids.device), paged)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, paged: Paged) -> torch.Tensor:
        out = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted, paged=paged, return_dict=True
        )
        logits: torch.Tensor = out.logits[0]
        ignored = logits.shape[0] != wanted.shape[0]  # some heads know no logits_to_keep
        return logits.index_select(0, wanted) if ignored else logits


def build(
    folder: Path,
    gguf_file: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_len: int,
    trust_remote_code: bool,
    drawn: bool = False,
) -> GenericModel:
    """Load a folder (or a GGUF file) through transformers; `drawn` keeps the random weights its models begin with.

    Raises ConfigError: unknown architecture, tensors missing or left over (named), or attention we cannot page.
    """
    transformers.AttentionInterface.register(_NAME, _attention)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    loading: dict[str, Any] = {}
    try:
        if drawn:
            model = _drawn(folder, dtype, device, trust_remote_code)
        elif gguf_file:
            model, loading = _from_gguf(folder, gguf_file, dtype, trust_remote_code)
        else:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=_NAME,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise ConfigError(f"--model-dir {folder}: transformers cannot build it ({str(error).strip()})") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loading.get(kind):
            raise ConfigError(f"--model-dir {folder}: {kind.replace('_', ' ')}: {_some(loading[kind])}")
    text = model.config.get_text_config(decoder=True)
    original = int(getattr(text, "original_max_position_embeddings", 0) or 0)
    if "longrope" in rope_kinds(text) and max_len > original > 0:
        raise ConfigError(
            f"--max-req-total-len {max_len}: beyond {original} tokens longrope rescales the whole batch; at most {original}"
        )
    return GenericModel(model.to(device).eval().requires_grad_(False))


def _drawn(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_NAME, trust_remote_code=trust_remote_code
        )


def _from_gguf(folder: Path, gguf_file: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """What `from_pretrained(gguf_file=...)` does, without the package `accelerate` that it insists on."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=_NAME, trust_remote_code=trust_remote_code
    )
    tensors = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(model.all_tied_weights_keys) if config.get_text_config().tie_word_embeddings else set()
    return model, {"missing_keys": set(missing) - tied, "unexpected_keys": unexpected}


def _some(items: Any) -> str:
    names = sorted(str(item) for item in items)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
