"""Any other decoder that transformers can build, with our paged attention in place of its own.

transformers lets an attention function be registered by name; models hand it q, k and v of one layer and pass keyword
arguments of their forward on to it. A step is one packed row [1, T] with position ids; the function finds the step in
its keyword `paged`. A dry run at start learns each layer's heads, scale and window, and refuses what would come out
wrong: attention that does not go through the interface, sinks, biases, masks of their own, shared or recurrent layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inferserve.attention.base import LayerSpec
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvShape
from inferserve.layers.context import ForwardContext

_NAME = "inferserve_paged"
_REFUSED = ("s_aux", "position_bias", "alibi", "attention_bias", "head_mask", "sinks")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class _Paged(Protocol):
    """Where the registered function takes a layer's q, k and v."""

    def attend(self, call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, heads, dim] each → [T, q_heads, v_dim]."""
        ...


@dataclass(frozen=True)
class _Call:
    """What a layer says about its attention."""

    layer: int
    scale: float
    window: int
    softcap: float
    refused: tuple[str, ...]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: _Paged | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function: [1, heads, T, dim] → [1, T, heads, dim]."""
    if paged is None:
        raise ConfigError("this model does not pass keyword arguments on to its attention")
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    refused += ["its own mask"] if attention_mask is not None else []
    refused += [] if kwargs.get("is_causal", getattr(module, "is_causal", True)) in (True, None) else ["no causality"]
    call = _Call(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
        refused=tuple(refused),
    )
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return paged.attend(call, q, k, v)[None], None


@dataclass
class _DryRun:
    """Records each layer's call and answers with zeros."""

    calls: list[_Call] = field(default_factory=list)
    shapes: dict[int, KvShape] = field(default_factory=dict)

    def attend(self, call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See _Paged."""
        self.calls.append(call)
        self.shapes[call.layer] = KvShape(k.shape[1], k.shape[2], v.shape[2])
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


@dataclass(frozen=True)
class _Step:
    """Sends a layer's q, k and v to the attention backend of a step."""

    ctx: ForwardContext
    specs: tuple[LayerSpec, ...]

    def attend(self, call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See _Paged."""
        return self.ctx.attention.forward(self.specs[call.layer], self.ctx.plan, q, k, v)


class GenericModel:
    """A `CausalModel` (see `spec`) around a transformers model."""

    def __init__(self, model: Any) -> None:
        """Dry-run `model`. Raises ConfigError with the reason if it cannot run on paged attention."""
        self._model = model
        dry = _DryRun()
        ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        last = torch.tensor([1], device=model.device)
        self._forward(ids, torch.arange(2, device=model.device)[None], last, dry)
        text = model.config.get_text_config(decoder=True)
        _refuse(model.config, text, dry)
        self.layer_specs = tuple(
            LayerSpec(c.layer, c.scale, c.window, c.softcap) for c in sorted(dry.calls, key=lambda c: c.layer)
        )
        self.kv_shapes = tuple(dry.shapes[s.layer] for s in self.layer_specs)

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See CausalModel."""
        positions = ctx.batch.positions[None]
        return self._forward(token_ids[None], positions, ctx.logits_index, _Step(ctx, self.layer_specs))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, paged: _Paged) -> torch.Tensor:
        out = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted, paged=paged, return_dict=True
        )
        logits: torch.Tensor = out.logits[0]
        ignored = logits.shape[0] != wanted.shape[0]  # some heads know no logits_to_keep
        return logits.index_select(0, wanted) if ignored else logits


def _refuse(config: Any, text: Any, dry: _DryRun) -> None:
    """Raise ConfigError if the dry run or the config shows something that paged attention would get wrong."""
    layers = int(text.num_hidden_layers)
    types = tuple(getattr(text, "layer_types", None) or ())[:layers]
    window = int(getattr(text, "sliding_window", None) or 0)
    seen = {call.layer: call for call in dry.calls}
    reasons = {f"attention with {what}" for call in dry.calls for what in call.refused}
    if sorted(c.layer for c in dry.calls) != list(range(layers)):
        reasons.add(f"{len(seen)} of its {layers} layers use transformers' attention interface")
    reasons |= {f"{kind} layers" for kind in types if kind not in _LAYER_TYPES}
    if any(seen[i].window != (window if t == "sliding_attention" else 0) for i, t in enumerate(types) if i in seen):
        reasons.add("a sliding window that it does not pass to its attention")
    if getattr(text, "num_kv_shared_layers", 0):
        reasons.add("layers that share K and V")
    if getattr(config, "is_encoder_decoder", False):
        reasons.add("an encoder")
    if "dynamic" in _rope_kinds(text):
        reasons.add("dynamic rope, which depends on the length of the whole batch there")
    if reasons:
        raise ConfigError(f"model type {text.model_type!r} cannot be served: {'; '.join(sorted(reasons))}")


def _rope_kinds(text: Any) -> set[str]:
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(r.get("rope_type", "default")) for r in nested}


def build(
    folder: Path, gguf_file: str, dtype: torch.dtype, device: torch.device, *, max_len: int, trust_remote_code: bool
) -> GenericModel:
    """Load a folder (or a GGUF file) through transformers.

    Raises ConfigError: unknown architecture, tensors missing or left over (named), or attention we cannot page.
    """
    transformers.AttentionInterface.register(_NAME, _attention)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        if gguf_file:
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
    if "longrope" in _rope_kinds(text) and max_len > original > 0:
        raise ConfigError(
            f"--max-req-total-len {max_len}: beyond {original} tokens longrope rescales the whole batch; at most {original}"
        )
    return GenericModel(model.to(device).eval().requires_grad_(False))


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
