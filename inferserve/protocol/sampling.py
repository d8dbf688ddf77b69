"""`SamplingParams`: the only description of how tokens are chosen. Validated at the edge, immutable afterwards.

Ranges are the union of what OpenAI, vLLM and LightLLM clients send; `validate()` is a closed-interval test, which NaN
fails by construction. The encoded form (msgpack) is written into the slot's `params` column by http and read once by
the engine and the detokenizer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from inferserve.errors import InvalidRequest

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_N = 64
# Logits are divided by it in float32: with much less, a legal request would end in values that are not finite.
MIN_REPETITION_PENALTY = 0.01


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How one sequence is sampled. `n` siblings get the same params with their own `seed`.

    Attributes:
        temperature: 0 means greedy.
        top_k: keep the k likeliest tokens; -1 keeps all.
        top_p, min_p: nucleus and minimum-probability filters, after temperature.
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: OpenAI's, over output tokens.
        logit_bias: token id to additive bias, -100..100.
        seed: 0..2^63-1. The edge always sets one, so a row's randomness is f(seed, position) and nothing else.
        max_tokens, min_tokens: output limits; eos and stop tokens are masked below `min_tokens`.
        stop: strings that end the text (cut from it unless `include_stop`).
        stop_token_ids: token ids that end it.
        ignore_eos: do not end at the model's eos.
        logprobs: None, or how many alternatives to report (0 = the chosen token only).
        skip_special_tokens: special tokens are left out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """True when a token depends on the model's logits alone, and nothing else is wanted of them."""
        edited = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.greedy and not edited and self.logprobs is None

    def validate(self, vocab_size: int) -> SamplingParams:
        """Return self, or raise InvalidRequest naming the field.

        Args:
            vocab_size: number of ids the model can emit; ids must lie in [0, vocab_size).
        """
        for rule in _RANGES:
            if not rule.low <= getattr(self, rule.field) <= rule.high:
                raise InvalidRequest(f"{rule.field} must be in [{rule.low}, {rule.high}]", param=rule.field)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p must be in (0, 1]", param="top_p")
        if self.top_k == 0:
            raise InvalidRequest("top_k must be -1 (all) or at least 1", param="top_k")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
        self._validate_lists(vocab_size)
        return self

    def _validate_lists(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS or any(not s or len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARS} characters",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
        if any(not 0 <= t < vocab_size for t in self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids must be in [0, {vocab_size})", param="stop_token_ids")
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        if any(not 0 <= t < vocab_size for t in bias):
            raise InvalidRequest(f"logit_bias keys must be token ids in [0, {vocab_size})", param="logit_bias")
        if any(not -100.0 <= v <= 100.0 for v in bias.values()):
            raise InvalidRequest("logit_bias values must be in [-100, 100]", param="logit_bias")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be in [0, {MAX_TOP_LOGPROBS}]", param="logprobs")


class _Range(NamedTuple):
    """One closed interval."""

    field: str
    low: float
    high: float


_RANGES = (
    _Range("temperature", 0.0, 2.0),
    _Range("min_p", 0.0, 1.0),
    _Range("presence_penalty", -2.0, 2.0),
    _Range("frequency_penalty", -2.0, 2.0),
    _Range("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
    _Range("top_k", -1, 2**31 - 1),
    _Range("seed", 0, 2**63 - 1),
    _Range("max_tokens", 1, 2**31 - 1),
    _Range("min_tokens", 0, 2**31 - 1),
)

assert all(math.isfinite(r.low) and math.isfinite(r.high) for r in _RANGES)
