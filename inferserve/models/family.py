"""`Family`: one row of the table of models that our own stack runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferserve.config.model_config import ModelConfig
from inferserve.models.spec import DecoderSpec
from inferserve.models.weights import WeightRow


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model_type: `model_type` of its config.json.
        spec: config → stack.
        names: where its tensors go.
        gguf_rotary_pairs: its GGUF files interleave the rotary halves of q and k (llama.cpp's layout for `llama`).
    """

    model_type: str
    spec: Callable[[ModelConfig], DecoderSpec]
    names: tuple[WeightRow, ...]
    gguf_rotary_pairs: bool = False
