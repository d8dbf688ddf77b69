"""Bodies of the OpenAI routes: strict types (true is no integer, "5" is no number), finite numbers, closed limits.

`null` means absent, as in OpenAI's own clients. Fields that are not listed are ignored unless they would change the
answer (`openai/refused.py`). Numbers that depend on the model (vocabulary, context) are checked by `openai/sampling.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from inferserve.protocol.sampling import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 2048
_INT32 = 2**31 - 1

Prompt = str | list[str] | list[int] | list[list[int]]
Stop = str | list[str] | None


def _check_prompt(value: Any) -> Prompt:
    """One check in C instead of pydantic's union, which would report every element once for each member."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds in ({str}, {int}) or not kinds:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _check_stop(value: Any) -> Stop:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or set(map(type, value)) - {str}:
        raise ValueError("must be a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"takes at most {MAX_STOP_STRINGS} strings")
    return value


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """How tokens are chosen; the same on both routes."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        None, description="Output limit. Clipped to what the prompt leaves of the context."
    )
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = Field(
        None, description="-1 keeps all tokens; 0 is invalid."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)] | None
    ) = Field(None, description="Token id (as a string) to additive bias.")
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = Field(None, description="-1 means none.")
    stop: Annotated[Stop, PlainValidator(_check_stop, json_schema_input_type=Stop)] = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    do_sample: bool | None = Field(None, description="false takes the likeliest token whatever temperature says.")
    skip_special_tokens: bool | None = None


class CompletionBody(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        None, description="Output limit, 16 if absent. Clipped to what the prompt leaves of the context."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add bos; true if absent.")


class TextPart(Body):
    """A part of a message's content; only text for now."""

    type: Literal["text", "input_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _part_text(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "refusal"):
        raise ValueError(f"part {number}: only text parts are supported, not {str(kind)[:40]!r}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"part {number}: its text must be a string")
    return text


def _joined_content(value: Any) -> str | None:
    """Text parts become one text, joined by newlines, which every template takes."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise ValueError(f"must be a string or a list of at most {MAX_PARTS} text parts")
    return "\n".join(_part_text(number, part) for number, part in enumerate(value))


class FunctionCall(Body):
    """A call in an earlier assistant message."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call in an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Body):
    """One message. Further fields (`reasoning_content`, …) reach the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | None, PlainValidator(_joined_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content of a {self.role} message must not be null")
        return self


class ChatBody(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        None, description="Output limit; what the prompt leaves of the context if absent. Clipped to that."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        None, description="Goes before max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
