"""The sampling fields of a body to `SamplingParams`: a pure function of the body and the model's limits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TypeVar

from inferserve.errors import InvalidRequest
from inferserve.http.openai.schema import SamplingFields
from inferserve.http.service import Limits
from inferserve.protocol.sampling import SamplingParams

T = TypeVar("T")


def sampling_params(
    body: SamplingFields, limits: Limits, *, max_tokens: int, max_name: str, logprobs: int | None
) -> SamplingParams:
    """Checked params of `body`. `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` that are absent come
    from the model's generation_config.json.

    Args:
        max_tokens: the output limit, already chosen by the route; `max_name` is the field it came from.
        logprobs: None, or how many alternatives.

    Raises InvalidRequest naming the field.
    """
    defaults = limits.defaults
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must not exceed {max_name} ({max_tokens})", param="min_tokens")
    temperature = _or(body.temperature, defaults.get("temperature", 1.0)) if body.do_sample is not False else 0.0
    return SamplingParams(
        temperature=temperature,
        top_p=_or(body.top_p, defaults.get("top_p", 1.0)),
        top_k=_or(body.top_k, default_top_k(defaults)),
        min_p=_or(body.min_p, defaults.get("min_p", 0.0)),
        repetition_penalty=_or(body.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias),
        seed=new_seed(body.seed, greedy=temperature == 0),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=_stop(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        skip_special_tokens=_or(body.skip_special_tokens, True),
    ).validate(limits.vocab_size)


def check_choices(body: SamplingFields, limits: Limits, prompts: int) -> int:
    """`n` of the body. Raises InvalidRequest when it, or it times the prompts, can never be served."""
    n = body.n or 1
    if n > limits.max_n:
        raise InvalidRequest(f"n must be in [1, {limits.max_n}]", param="n")
    if n * prompts > limits.max_sequences:
        raise InvalidRequest(
            f"{prompts} prompts with n = {n} are more than the {limits.max_sequences} sequences that can be in flight",
            param="prompt",
        )
    return n


def check_stream_options(body: SamplingFields) -> None:
    """Raises InvalidRequest for stream options of a request that is not streamed."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")


def new_seed(seed: int | None, *, greedy: bool) -> int:
    """The client's seed; else a random one in 0..2^63-1, and 0 where nothing is drawn, so that equal requests are equal."""
    if seed is not None and seed != -1:
        return seed
    return 0 if greedy else secrets.randbits(63)


def default_top_k(defaults: Mapping[str, float]) -> int:
    """top_k of generation_config.json, where 0 means all."""
    return int(defaults.get("top_k", -1)) or -1


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    out: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequest(f"logit_bias keys must be token ids, not {key[:40]!r}", param="logit_bias")
        out[int(key)] = value
    return out


def _stop(body: SamplingFields) -> tuple[str, ...]:
    if body.stop is None or body.stop == "":
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
