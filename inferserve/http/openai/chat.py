"""POST /v1/chat/completions.

`max_completion_tokens` (or else `max_tokens`) limits the output; absent, the answer may take what the prompt leaves of
the context; larger values are clipped to that, streamed or not. 0 and less are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from inferserve.errors import InvalidRequest
from inferserve.http import problems, strict_json
from inferserve.http.generation import GenerateRequest
from inferserve.http.openai import refused
from inferserve.http.openai.answers import Answer
from inferserve.http.openai.chunks import CHAT, Chunks
from inferserve.http.openai.identity import identify
from inferserve.http.openai.logprobs import ChatLogprobs, TokenTexts
from inferserve.http.openai.sampling import check_choices, check_stream_options, sampling_params
from inferserve.http.openai.schema import ChatBody, Message
from inferserve.http.prompts import ChatPrompt
from inferserve.http.service import GenerationService, Limits
from inferserve.http.streams import StreamedResponse, WholeResponse
from inferserve.protocol.sampling import SamplingParams


def parse(raw: Mapping[str, Any], limits: Limits) -> ChatBody:
    """The checked body. Raises InvalidRequest or NotFound naming the field."""
    refused.check(raw, refused.CHAT)
    try:
        body = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise problems.from_validation(error) from error
    limits.check_model(body.model)
    check_stream_options(body)
    check_choices(body, limits, prompts=1)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return body


def params_of(body: ChatBody, limits: Limits) -> SamplingParams:
    """Sampling params of a chat. Raises InvalidRequest naming the field."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return sampling_params(
        body,
        limits,
        max_tokens=body.max_completion_tokens or body.max_tokens or limits.context,
        max_name=name,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def prompt_of(body: ChatBody) -> ChatPrompt:
    """The conversation as templates take it."""
    generation_prompt = body.add_generation_prompt is not False
    return ChatPrompt([_plain(m) for m in body.messages], generation_prompt, body.chat_template_kwargs or {})


def _content(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def routes(service: GenerationService) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, streamed as server-sent events or whole."""
        body = parse(strict_json.decode_object(await request.body()), service.limits)
        params = params_of(body, service.limits)
        ids = await service.encode_chat(prompt_of(body))
        service.limits.check_prompt(ids, "messages")
        identity, trace = identify(request, "chatcmpl-", service.limits)
        generate = GenerateRequest(
            prompts=(ids,), params=params, n=body.n or 1, want_tokens=bool(body.logprobs), **trace
        )
        texts = TokenTexts(service.tokenizer, params.skip_special_tokens, params.logprobs or 0)
        logprobs = ChatLogprobs(texts).part if body.logprobs else None
        if not body.stream:
            return WholeResponse(service, generate, Answer("chat.completion", identity, _content, logprobs))
        events = Chunks(CHAT, identity, generate.n, body.stream_options, len(ids), logprobs)
        return StreamedResponse(service, generate, events)

    return router


def _plain(message: Message) -> dict[str, Any]:
    """A message for the template; arguments of earlier calls become objects, which templates print as JSON."""
    out = message.model_dump(exclude_unset=True)
    if out.get("content") is None:
        out["content"] = ""
    for call in out.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            # What a model wrote need not be JSON; then the template gets the text.
            with contextlib.suppress(InvalidRequest):
                call["function"]["arguments"] = strict_json.decode_object(arguments.encode())
    return out
