"""POST /v1/completions: one prompt or several, as text or token ids.

`max_tokens` absent means 16; values beyond what a prompt leaves of the context are clipped to it, streamed or not; 0
(which makes sense with `echo` only) and less are refused. Choice number = prompt number * n + sequence number.
"""

from __future__ import annotations

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
from inferserve.http.openai.chunks import COMPLETION, Chunks
from inferserve.http.openai.identity import identify
from inferserve.http.openai.logprobs import CompletionLogprobs, TokenTexts
from inferserve.http.openai.sampling import check_choices, check_stream_options, sampling_params
from inferserve.http.openai.schema import MAX_PROMPTS, CompletionBody
from inferserve.http.service import GenerationService, Limits
from inferserve.http.streams import StreamedResponse, WholeResponse
from inferserve.protocol.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16


def parse(raw: Mapping[str, Any], limits: Limits) -> CompletionBody:
    """The checked body. Raises InvalidRequest or NotFound naming the field."""
    refused.check(raw, refused.COMPLETION)
    try:
        body = CompletionBody.model_validate(raw)
    except ValidationError as error:
        raise problems.from_validation(error) from error
    limits.check_model(body.model)
    check_stream_options(body)
    prompts = prompts_of(body)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    check_choices(body, limits, len(prompts))
    return body


def prompts_of(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts one by one. Raises InvalidRequest for none and for empty ones."""
    prompt: Any = body.prompt
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return prompts


def params_of(body: CompletionBody, limits: Limits) -> SamplingParams:
    """Sampling params of a completion. Raises InvalidRequest naming the field."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_completion_tokens or body.max_tokens or DEFAULT_MAX_TOKENS
    return sampling_params(body, limits, max_tokens=max_tokens, max_name=name, logprobs=body.logprobs)


def _content(text: str) -> dict[str, Any]:
    return {"text": text}


async def _token_ids(body: CompletionBody, service: GenerationService) -> tuple[list[int], ...]:
    """Ids of all prompts, checked."""
    out = []
    for prompt in prompts_of(body):
        ids = (
            await service.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
            if isinstance(prompt, str)
            else prompt
        )
        service.limits.check_prompt(ids, "prompt")
        out.append(ids)
    return tuple(out)


def routes(service: GenerationService) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        """Continue one or several prompts, streamed as server-sent events or whole."""
        body = parse(strict_json.decode_object(await request.body()), service.limits)
        params = params_of(body, service.limits)
        prompts = await _token_ids(body, service)
        identity, trace = identify(request, "cmpl-", service.limits)
        wanted = body.logprobs is not None
        generate = GenerateRequest(
            prompts=prompts,
            params=params,
            n=body.n or 1,
            drawn_seed=body.seed in (None, -1) and params.temperature > 0,
            want_tokens=wanted,
            **trace,
        )
        texts = TokenTexts(service.tokenizer, params.skip_special_tokens, params.logprobs or 0)
        logprobs = CompletionLogprobs(texts).part if wanted else None
        if not body.stream:
            return WholeResponse(service, generate, Answer("text_completion", identity, _content, logprobs))
        events = Chunks(
            COMPLETION,
            identity,
            len(prompts) * generate.n,
            body.stream_options,
            sum(map(len, prompts)),
            logprobs,
        )
        return StreamedResponse(service, generate, events)

    return router
