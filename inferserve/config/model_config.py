"""`ModelConfig`: a Hugging Face config.json under one set of names. Knows no torch and no weights.

Families spell the same thing differently and transformers 5 moved the rotary settings; both spellings end up here
once, so that nothing downstream reads raw JSON. Settings that only the generic backend understands (other rope kinds,
other layer types) are kept as words; whether a model can run is decided in `models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferserve.config.quantization import Quantization
from inferserve.errors import ConfigError

Json = Mapping[str, Any]

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
}
"""Our name of a key, and its spellings, likeliest first."""

_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "gpt2", "bloom"})
_WINDOW_NEEDS_SWITCH = frozenset({"qwen2", "qwen3"})
_KV_HEADS_DEFAULT = {"mistral": 8}
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings; meanings as in transformers' `modeling_rope_utils`.

    Attributes:
        kind: default, linear, dynamic, yarn, llama3, or a word only the generic backend knows.
        theta: base.
        factor: context extension; 1 where the kind has none.
        partial: share of the head that is rotated, (0, 1].
        original_max_position: context of pre-training, for yarn and llama3.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, truncate, mscale, mscale_all_dim: yarn.
        attention_factor: yarn's scale of cos and sin; 0 = derived from the others.
        by_layer_type: True when the config holds one set per layer type (this one is full attention's).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    partial: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    by_layer_type: bool = False

    @staticmethod
    def from_json(raw: Json, max_position: int) -> RopeConfig:
        """From the text config `raw`: transformers 5's `rope_parameters`, or `rope_scaling` and `rope_theta`.

        Raises ConfigError naming the key that is missing or wrong.
        """
        key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        rope: Json = raw.get(key) or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"config.json: {key} must be an object, not {rope!r}")
        nested = any(isinstance(rope.get(t), Mapping) for t in ("full_attention", "sliding_attention"))
        if nested:
            rope = rope.get("full_attention") or rope["sliding_attention"]
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        read = _Reader(rope, prefix=f"{key}.")
        outer = _Reader(raw)
        theta = (
            read.number("rope_theta", 0.0)
            or outer.number("rope_theta", 0.0)
            or outer.number("rotary_emb_base", 10000.0)
        )
        partial = read.number("partial_rotary_factor", 0.0) or outer.number("partial_rotary_factor", 0.0)
        if not 0.0 < (partial or outer.number("rotary_pct", 1.0)) <= 1.0:
            raise ConfigError("config.json: partial_rotary_factor must be in (0, 1]")
        original = int(read.number("original_max_position_embeddings", 0)) or max_position
        if isinstance(raw.get("original_max_position_embeddings"), int):
            original = int(raw["original_max_position_embeddings"])
        factor = read.number("factor", 0.0)
        if kind in ("linear", "dynamic", "llama3") and not factor:
            raise ConfigError(f"config.json: {key}.factor is missing (rope type {kind})")
        if kind == "llama3":
            read.need("low_freq_factor")
            read.need("high_freq_factor")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor or (max_position / original if kind == "yarn" else 1.0),
            partial=partial or outer.number("rotary_pct", 1.0),
            original_max_position=original,
            low_freq_factor=read.number("low_freq_factor", 1.0),
            high_freq_factor=read.number("high_freq_factor", 4.0),
            beta_fast=read.number("beta_fast", 0.0) or 32.0,
            beta_slow=read.number("beta_slow", 0.0) or 1.0,
            truncate=read.flag("truncate", True),
            mscale=read.number("mscale", 0.0),
            mscale_all_dim=read.number("mscale_all_dim", 0.0),
            attention_factor=read.number("attention_factor", 0.0),
            by_layer_type=nested,
        )


@dataclass(frozen=True)
class ModelConfig:
    """One decoder.

    Attributes:
        model_type, architecture: `llama`, `LlamaForCausalLM`.
        windows: sliding window of each layer in tokens (a token sees itself and window - 1 before it); 0 = all.
        layer_types: as in the config, () where it names none.
        rope: rotary settings.
        max_position: `max_position_embeddings` as it stands in the config.
        attention_bias, mlp_bias: the config's switches; what a family has in any case is in `models`.
        eos_ids: ids that end a text.
        dtype: dtype of the weights: float32, float16, bfloat16, or '' where the config does not say.
        quantization: how the checkpoint stores them, None = as such floats.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    hidden_act: str
    rope: RopeConfig
    max_position: int
    windows: tuple[int, ...]
    layer_types: tuple[str, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens the model is meant for, rope scaling included."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    @staticmethod
    def from_json(config: Json) -> ModelConfig:
        """Normalise a config.json; a nested `text_config` is the decoder, the rest may name eos and architecture.

        Raises ConfigError naming the key that is missing or wrong.
        """
        text: Json = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config must be an object")
        read = _Reader(text)
        model_type = str(text.get("model_type") or config.get("model_type") or "")
        if not model_type:
            raise ConfigError("config.json: model_type is missing")
        heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
        kv_heads = read.size("num_key_value_heads", _KV_HEADS_DEFAULT.get(model_type, heads))
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        layers = read.size("num_hidden_layers")
        max_position = read.size("max_position_embeddings", 2048)
        layer_types = tuple(text.get("layer_types") or ())
        return ModelConfig(
            model_type=model_type,
            architecture=str(_first(config.get("architectures")) or _first(text.get("architectures")) or ""),
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=read.size("head_dim", 128 if model_type == "qwen3" else max(hidden // heads, 1)),
            intermediate_size=read.size("intermediate_size", 4 * hidden),
            norm_eps=read.number("norm_eps", 1e-6),
            hidden_act=str(read.raw("hidden_act") or "silu"),
            rope=RopeConfig.from_json(text, max_position),
            max_position=max_position,
            windows=_windows(read, model_type, layers, layer_types),
            layer_types=layer_types,
            tie_word_embeddings=_tied(config, text, model_type),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
            eos_ids=_eos_ids(config.get("eos_token_id", text.get("eos_token_id"))),
            dtype=_dtype(
                text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
            ),
            quantization=Quantization.from_json(config),
        )


class _Reader:
    """Typed reads of a JSON object under any spelling; errors name the key."""

    def __init__(self, raw: Json, prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        """The value under the first spelling that is there, or None."""
        values = (self._raw.get(spelling) for spelling in _NAMES.get(name, (name,)))
        return next((v for v in values if v is not None), None)

    def need(self, name: str) -> Any:
        """The value; it must be there."""
        value = self.raw(name)
        if value is None:
            raise ConfigError(f"config.json: {self._prefix}{name} is missing")
        return value

    def size(self, name: str, default: int = 0) -> int:
        """A positive integer; without default it must be there."""
        value = self.raw(name)
        value = (default or self.need(name)) if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {self._prefix}{name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number that is not negative."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"config.json: {self._prefix}{name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; null means the default."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {self._prefix}{name} must be true or false, not {value!r}")
        return value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _windows(read: _Reader, model_type: str, layers: int, layer_types: tuple[str, ...]) -> tuple[int, ...]:
    """Sliding window of each layer. Qwen's is off unless `use_sliding_window`, and starts at `max_window_layers`."""
    window = int(read.number("sliding_window", 0))
    if model_type in _WINDOW_NEEDS_SWITCH and not read.flag("use_sliding_window", False):
        window = 0
    if layer_types and model_type != "mistral":
        if len(layer_types) < layers:
            raise ConfigError(f"config.json: layer_types names {len(layer_types)} of {layers} layers")
        return tuple(window if t == "sliding_attention" else 0 for t in layer_types[:layers])
    if model_type in _WINDOW_NEEDS_SWITCH:
        first = int(read.number("max_window_layers", 28))
        return tuple(window if i >= first else 0 for i in range(layers))
    return (window,) * layers


def _tied(config: Json, text: Json, model_type: str) -> bool:
    for source in (config, text):
        value = source.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return model_type in _TIED_BY_DEFAULT


def _eos_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"config.json: eos_token_id must be an id or a list of ids, not {value!r}")
    return tuple(ids)


def _dtype(value: Any) -> str:
    name = str(value or "").removeprefix("torch.")
    return name if name in _DTYPES else ""
