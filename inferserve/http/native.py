"""LightLLM's own routes: POST /generate, /generate_stream, and /tokens, in its exact shapes but with real status codes.

`parameters` that this server does not do are refused by name when they would change the answer. A stream has one
`data:` frame a token and no terminal marker; an error in it is a last frame `{"error": …}`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, ValidationError
from starlette.responses import JSONResponse, Response

from inferserve.errors import InvalidRequest, RequestError
from inferserve.http import problems, strict_json
from inferserve.http.generation import GenerateRequest, Piece, TokenDetails, Usage, finish_name
from inferserve.http.openai.logprobs import finite
from inferserve.http.openai.sampling import default_top_k, new_seed
from inferserve.http.openai.schema import Body
from inferserve.http.prompts import TextTokenizer
from inferserve.http.service import GenerationService, Limits
from inferserve.http.streams import Choice, StreamedResponse, WholeResponse, error_event, json_line
from inferserve.protocol.sampling import MAX_N, MAX_STOP_STRINGS, MIN_REPETITION_PENALTY, SamplingParams

_INT32 = 2**31 - 1

Stops = str | list[str | list[int]] | None
# What they say if they ask for nothing; anything else changes the answer and is refused.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "exponential_decay_length_penalty": ([1, 1.0],),
    "regular_constraint": (None, ""),
    "guided_grammar": (None, ""),
    "guided_json": (None, ""),
    "allowed_token_ids": (None, []),
    "input_penalty": (None, False),
    "print_eos_token": (None, False),
    "add_spaces_between_special_tokens": (None, True),
}


def _check_stops(value: Any) -> Stops:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOP_STRINGS} strings or token id lists")
    if not all(type(s) is str or (type(s) is list and s and set(map(type, s)) == {int}) for s in value):
        raise ValueError("must hold strings or lists of token ids")
    return value


def _check_inputs(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int}):
        return value
    raise ValueError("must be a string or a list of token ids")


class Parameters(Body):
    """`parameters` of a native request; defaults of sampling come from the model's generation_config.json."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Must equal n.")
    do_sample: bool | None = Field(None, description="false takes the likeliest token.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    ignore_eos: bool = False
    max_new_tokens: Annotated[int, Field(ge=1, le=_INT32)] = 16
    min_new_tokens: Annotated[int, Field(ge=0, le=_INT32)] = 1
    stop_sequences: Annotated[Stops, PlainValidator(_check_stops, json_schema_input_type=Stops)] = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_details: bool = False


class NativeBody(Body):
    """Body of /generate and /generate_stream."""

    inputs: Annotated[str | list[int], PlainValidator(_check_inputs, json_schema_input_type=str | list[int])]
    parameters: Parameters
    multimodal_params: dict[str, Any] | None = None


class TokensParameters(Body):
    """The one parameter that counting knows."""

    add_special_tokens: bool = True


class TokensBody(Body):
    """Body of /tokens."""

    text: str
    parameters: TokensParameters | None = None
    multimodal_params: dict[str, Any] | None = None


def parse(raw: Mapping[str, Any], limits: Limits) -> NativeBody:
    """The checked body. Raises InvalidRequest naming the field."""
    parameters = raw.get("parameters")
    if isinstance(parameters, dict):
        for name, harmless in _UNSUPPORTED.items():
            if name in parameters and parameters[name] not in harmless:
                raise InvalidRequest(f"{name} is not supported by this server", param=name, code="unsupported_field")
    try:
        body = NativeBody.model_validate(raw)
    except ValidationError as error:
        raise problems.from_validation(error) from error
    if any((body.multimodal_params or {}).values()):
        raise InvalidRequest("multimodal_params: this server takes text only", param="multimodal_params")
    n, best_of = body.parameters.n or body.parameters.best_of or 1, body.parameters.best_of
    if best_of not in (None, n):
        raise InvalidRequest("best_of must equal n", param="best_of")
    if n > limits.max_n:
        raise InvalidRequest(f"n must be in [1, {limits.max_n}]", param="n")
    return body


def params_of(body: NativeBody, limits: Limits, tokenizer: TextTokenizer, *, logprobs: bool) -> SamplingParams:
    """Sampling params. A stop given as one token id stops at that id, longer lists at their text.

    Raises InvalidRequest naming the field.
    """
    given, defaults = body.parameters, limits.defaults
    sample = bool(defaults.get("do_sample", 0)) if given.do_sample is None else given.do_sample
    stops = [given.stop_sequences] if isinstance(given.stop_sequences, str) else given.stop_sequences or []
    if any(not 0 <= t < limits.vocab_size for s in stops if isinstance(s, list) for t in s):
        raise InvalidRequest(f"stop_sequences must hold token ids in [0, {limits.vocab_size})", param="stop_sequences")
    texts = [s if isinstance(s, str) else tokenizer.decode(s, False) for s in stops if isinstance(s, str) or len(s) > 1]
    if given.min_new_tokens > given.max_new_tokens:
        raise InvalidRequest("min_new_tokens must not exceed max_new_tokens", param="min_new_tokens")

    def choose(value: float | None, name: str, default: float) -> float:
        return defaults.get(name, default) if value is None else value

    return SamplingParams(
        temperature=choose(given.temperature, "temperature", 1.0) if sample else 1.0,
        top_p=choose(given.top_p, "top_p", 1.0) if sample else 1.0,
        top_k=(default_top_k(defaults) if given.top_k is None else given.top_k) if sample else 1,
        repetition_penalty=choose(given.repetition_penalty, "repetition_penalty", 1.0),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=new_seed(given.seed, greedy=not sample),
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        stop=tuple(texts),
        stop_token_ids=tuple(s[0] for s in stops if isinstance(s, list) and len(s) == 1),
        ignore_eos=given.ignore_eos,
        logprobs=0 if logprobs else None,
        skip_special_tokens=given.skip_special_tokens,
    ).validate(limits.vocab_size)


def _tokens(
    details: TokenDetails, text: str, last_count: int, prompt_tokens: int, special: frozenset[int]
) -> list[dict[str, Any]]:
    """One object a token; the text that several tokens made together comes with the last of them."""
    first = last_count - len(details.ids) + 1
    return [
        {
            "id": token_id,
            "text": text if first + i == last_count else "",
            "logprob": finite(logprob),
            "special": token_id in special,
            "count_output_tokens": first + i,
            "prompt_tokens": prompt_tokens,
        }
        for i, (token_id, logprob) in enumerate(zip(details.ids, details.logprobs, strict=True))
    ]


class NativeEvents:
    """`EventFormat` of /generate_stream."""

    def __init__(self, prompt_tokens: int, special: frozenset[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._special = special
        self._input_usage = _input_usage(prompt_tokens)

    def event(self, piece: Piece) -> bytes:
        """One frame a token; the last one says that it is."""
        details = piece.details or TokenDetails([], [])
        tokens = _tokens(details, piece.text, piece.tokens, self._prompt_tokens, self._special)
        if not tokens and (piece.finish or piece.text):
            # The end of a held-back text: it belongs to the last token, which was shown before.
            tokens = [self._bare_token(piece)]
        last = len(tokens) - 1
        return b"".join(self._frame(t, finish_name(piece.finish) if i == last else None) for i, t in enumerate(tokens))

    def end(self, _: Usage) -> bytes:
        """Nothing: LightLLM's streams just end."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """An error frame."""
        return error_event(error, b"data:")

    def _bare_token(self, piece: Piece) -> dict[str, Any]:
        counts = {"count_output_tokens": piece.tokens, "prompt_tokens": self._prompt_tokens}
        return {"id": None, "text": piece.text, "logprob": None, "special": False, **counts}

    def _frame(self, token: dict[str, Any], finish: str | None) -> bytes:
        frame = {
            "token": token,
            "generated_text": None,
            "finished": finish is not None,
            "finish_reason": finish,
            "details": None,
            "input_usage": self._input_usage,
        }
        return b"data:" + json_line(frame) + b"\n\n"


class NativeAnswer:
    """`WholeFormat` of /generate: lists when there are several sequences, scalars else."""

    def __init__(self, return_details: bool, prompt_tokens: int, special: frozenset[int]) -> None:
        self._return_details = return_details
        self._prompt_tokens = prompt_tokens
        self._special = special

    def details(self, piece: Piece) -> Mapping[str, list[Any]] | None:
        """`tokens`, if asked for."""
        if piece.details is None:
            return None
        return {"tokens": _tokens(piece.details, piece.text, piece.tokens, self._prompt_tokens, self._special)}

    def answer(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body."""

        def each(of: Callable[[Choice], Any]) -> Any:
            values = [of(choice) for choice in choices]
            return values[0] if len(values) == 1 else values

        out: dict[str, Any] = {
            "generated_text": [choice.text for choice in choices],
            "count_output_tokens": each(lambda choice: choice.tokens),
            "finish_reason": each(lambda choice: finish_name(choice.finish)),
            "prompt_tokens": usage.prompt_tokens,
        }
        if self._return_details:
            out["tokens"] = each(lambda choice: choice.details["tokens"] if choice.details else [])
        out["input_usage"] = _input_usage(usage.prompt_tokens)
        return out


def _input_usage(prompt_tokens: int) -> dict[str, int]:
    return {"input_text_tokens": prompt_tokens, "input_audio_tokens": 0, "input_image_tokens": 0}


def routes(service: GenerationService) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["native"])

    async def prepare(request: Request, *, streamed: bool) -> tuple[NativeBody, GenerateRequest]:
        limits = service.limits
        body = parse(strict_json.decode_object(await request.body()), limits)
        wanted = streamed or body.parameters.return_details
        params = params_of(body, limits, service.tokenizer, logprobs=wanted)
        ids = body.inputs
        if isinstance(ids, str):
            ids = await service.encode(ids, add_special_tokens=body.parameters.add_special_tokens)
        limits.check_prompt(ids, "inputs")
        state = request.state
        generate = GenerateRequest(
            prompts=(ids,),
            params=params,
            n=body.parameters.n or body.parameters.best_of or 1,
            want_tokens=wanted,
            request_id=state.request_id,
            session_id=state.session_id,
            name="gen-" + uuid.uuid4().hex,
            arrival_ns=state.arrival_ns,
        )
        return body, generate

    @router.post("/generate", response_class=Response)
    async def generate(request: Request) -> Response:
        """Continue `inputs`; answers when all is there."""
        body, wanted = await prepare(request, streamed=False)
        answer = NativeAnswer(body.parameters.return_details, len(wanted.prompts[0]), service.tokenizer.special_ids)
        return WholeResponse(service, wanted, answer)

    @router.post("/generate_stream", response_class=Response)
    async def generate_stream(request: Request) -> Response:
        """Continue `inputs`, one frame a token."""
        _, wanted = await prepare(request, streamed=True)
        if wanted.n > 1:
            raise InvalidRequest("generate_stream serves one sequence; n must be 1", param="n")
        return StreamedResponse(service, wanted, NativeEvents(len(wanted.prompts[0]), service.tokenizer.special_ids))

    @router.post("/tokens")
    @router.get("/tokens", include_in_schema=False)
    async def tokens(request: Request) -> Response:
        """How many tokens `text` has."""
        try:
            body = TokensBody.model_validate(strict_json.decode_object(await request.body()))
        except ValidationError as error:
            raise problems.from_validation(error) from error
        if any((body.multimodal_params or {}).values()):
            raise InvalidRequest("multimodal_params: this server takes text only", param="multimodal_params")
        special = body.parameters is None or body.parameters.add_special_tokens
        return JSONResponse({"ntokens": len(await service.encode(body.text, add_special_tokens=special))})

    return router
