"""The dry run of a transformers model at start: what each layer asks for, and whether packed rows come out right.

Two short sequences go through the model interleaved in one row, each layer's attention done here in plain torch; their
logits must equal those of the model's own attention on one sequence at a time. What this cannot show (windows longer
than the sequences, rope that rescales) is read from the config. Knows nothing of the paged pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from inferserve.attention.base import LayerSpec
from inferserve.attention.reference import attend
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvShape

_OWNER = (0, 1, 0, 1, 0, 1, 0, 1, 0, 0)
_POSITION = (0, 0, 1, 1, 2, 2, 3, 3, 4, 5)
"""Two sequences, interleaved: rotary positions are relative, so merely shifted ones would hide that they are ignored."""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = 0.05
"""Of the largest logit, for the median token: rounding and a flipped expert pass, a wrong position does not."""


@dataclass(frozen=True)
class Call:
    """What a layer says about its attention; `refused` names what paged attention does not do."""

    spec: LayerSpec
    refused: tuple[str, ...]


class Paged(Protocol):
    """Where the registered attention function takes a layer's q, k and v."""

    def attend(self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, heads, dim] each → [T, q_heads, v_dim]."""
        ...


@dataclass
class DryRun:
    """Records each layer's call and attends within each of the packed sequences."""

    calls: list[Call] = field(default_factory=list)
    shapes: dict[int, KvShape] = field(default_factory=dict)

    def attend(self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See Paged."""
        self.calls.append(call)
        self.shapes[call.spec.layer] = KvShape(k.shape[1], k.shape[2], v.shape[2], q.shape[1] // k.shape[1])
        group = q.shape[1] // k.shape[1]
        heads_first = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        q, k, v = (t.transpose(0, 1)[None] for t in heads_first)
        return attend(call.spec, q, k, v, _mask(call.spec.window, q))[0].transpose(0, 1)


def _mask(window: int, like: torch.Tensor) -> torch.Tensor:
    at, owner = torch.tensor(_POSITION), torch.tensor(_OWNER)
    hidden = (owner[:, None] != owner) | (at[:, None] < at)
    if window:
        hidden |= at[:, None] - at >= window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(like)


Packed = Callable[[torch.Tensor, torch.Tensor, Paged], torch.Tensor]
"""Ids and positions [T] and where attention goes → logits [T, vocab]."""


def probe(model: Any, packed: Packed, paged_name: str) -> DryRun:
    """Run the two sequences. Raises ConfigError with every reason why the model cannot run on paged attention."""
    text = model.config.get_text_config(decoder=True)
    ids = torch.arange(3, 3 + len(_OWNER), device=model.device) % text.vocab_size
    dry = DryRun()
    try:
        logits = packed(ids, torch.tensor(_POSITION, device=model.device), dry)
    except TypeError as error:
        raise ConfigError(f"model type {text.model_type!r} cannot be served: {error}") from error
    reasons = _obstacles(model.config, text, dry)
    if not reasons:
        model.set_attn_implementation("eager")
        errors = torch.cat([_errors(model, ids, logits, sequence) for sequence in set(_OWNER)])
        model.set_attn_implementation(paged_name)
        if not float(errors.median()) < _TOLERANCE:
            reasons.add("packed sequences come out otherwise than alone")
    if reasons:
        raise ConfigError(f"model type {text.model_type!r} cannot be served: {'; '.join(sorted(reasons))}")
    return dry


def _errors(model: Any, ids: torch.Tensor, logits: torch.Tensor, sequence: int) -> torch.Tensor:
    """Largest error of each token of one sequence, relative to its largest logit when it runs alone."""
    mine = torch.tensor(_OWNER, device=ids.device) == sequence
    wanted = model(input_ids=ids[mine][None], use_cache=False).logits[0]
    return (logits[mine] - wanted).abs().amax(-1) / wanted.abs().amax(-1)


def _obstacles(config: Any, text: Any, dry: DryRun) -> set[str]:
    """What the calls and the config show that paged attention would get wrong."""
    layers = int(text.num_hidden_layers)
    types = tuple(getattr(text, "layer_types", None) or ())[:layers]
    window = int(getattr(text, "sliding_window", None) or 0)
    seen = {call.spec.layer: call.spec for call in dry.calls}
    reasons = {f"attention with {what}" for call in dry.calls for what in call.refused}
    if sorted(call.spec.layer for call in dry.calls) != list(range(layers)):
        reasons.add(f"{len(seen)} of its {layers} layers use transformers' attention interface")
    reasons |= {f"{kind} layers" for kind in types if kind not in _LAYER_TYPES}
    if any(seen[i].window != (window if t == "sliding_attention" else 0) for i, t in enumerate(types) if i in seen):
        reasons.add("a sliding window that it does not pass to its attention")
    if getattr(text, "num_kv_shared_layers", 0):
        reasons.add("layers that share K and V")
    if getattr(config, "is_encoder_decoder", False):
        reasons.add("an encoder")
    if "dynamic" in rope_kinds(text):
        reasons.add("dynamic rope, which depends on the length of the whole batch there")
    return reasons


def rope_kinds(text: Any) -> set[str]:
    """Rope types of a transformers text config, of all its layer types."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(r.get("rope_type", "default")) for r in nested}
