"""A `GenerationService` without neighbours: made-up text, a byte tokenizer, and hooks to stop, fail and observe.

Choice `c` of a request says the words of `words(seed of its sibling)`, one word a token, until max_tokens. Token ids are
1000 + word number; logprobs fall from -0.5. `ask()` and `post()` drive the real ASGI app without a socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec
from starlette.types import ASGIApp

from inferserve.config.schema import HttpPart, ModelFacts, ModelPart, ServerConfig
from inferserve.errors import RequestError, RequestFailed
from inferserve.http.app import create_app
from inferserve.http.generation import GenerateRequest, Generation, Piece, TokenDetails
from inferserve.http.prompts import ChatPrompt, PromptEncoder
from inferserve.http.service import Limits
from inferserve.http.serving import Serving
from inferserve.protocol.messages import Finish, TopLogprobs
from inferserve.protocol.seeds import sibling_seed
from inferserve.tokenize.chat import ChatTemplate

T = TypeVar("T")

MODEL = "fake-model"
CONTEXT = 128
VOCAB = 2000
WORDS = (" alpha", " beta", " gamma", " dé", "\u2028", " 😀", " zeta", ' "q"\n')
BYTES_FROM = 3
LIMITS = Limits(context=CONTEXT, vocab_size=VOCAB, max_n=4, max_sequences=8, model_names=(MODEL, "alias"))
TEMPLATE = (
    "{%- for m in messages %}{%- if m.role == 'system' and loop.index0 > 0 %}"
    "{{ raise_exception('system must come first') }}{%- endif %}"
    "<{{ m.role }}>{{ m['content'] + eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """Id 3 + b is the byte b; 1 is bos, 2 eos, 1000 + i a word of the made-up text."""

    special_ids = frozenset({0, 1, 2})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [BYTES_FROM + b for b in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i >= BYTES_FROM or not skip_special_tokens).decode()

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        if token_id >= 1000:
            return WORDS[(token_id - 1000) % len(WORDS)].encode()
        return bytes([token_id - BYTES_FROM]) if token_id >= BYTES_FROM else b"<s>"


def words(seed: int, count: int) -> list[int]:
    """Word numbers of the text of a seed."""
    return [(seed * 31 + i * 3) % len(WORDS) for i in range(count)]


def text_of(seed: int, count: int) -> str:
    """The text of a seed."""
    return "".join(WORDS[w] for w in words(seed, count))


@dataclass
class FakeService:
    """The fake. `gate` holds back all tokens while it is unset; `fail_after` ends requests with `error` after so many."""

    limits: Limits = LIMITS
    serving: Serving = field(default_factory=lambda: Serving(lambda: None))
    fail_after: int | None = None
    error: RequestError = field(default_factory=lambda: RequestFailed("the row broke"))
    submit_error: RequestError | None = None
    finish: Finish = Finish.LENGTH
    requests: list[GenerateRequest] = field(default_factory=list)
    closed: list[Generation] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    metrics_page: bytes = b"# nothing\n"

    def __post_init__(self) -> None:
        self.serving.ready = True
        self.gate = asyncio.Event()
        self.gate.set()
        self._prompts = PromptEncoder(
            ByteTokenizer(), ChatTemplate(TEMPLATE, {"eos_token": "</s>"}), self.limits.context
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._prompts.text(text, add_special_tokens)

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        return await self._prompts.chat(prompt)

    def submit(self, request: GenerateRequest) -> Generation:
        if self.submit_error is not None:
            raise self.submit_error
        self.requests.append(request)
        generation = Generation(request, self.closed.append)
        task = asyncio.get_running_loop().create_task(self._speak(request, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def scrape(self) -> bytes:
        return self.metrics_page

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    async def _speak(self, request: GenerateRequest, generation: Generation) -> None:
        limits = [min(request.params.max_tokens, CONTEXT - len(p)) for p in request.prompts for _ in range(request.n)]
        period = len(limits) if request.drawn_seed else request.n
        seeds = [sibling_seed(request.params.seed, i % period) for i in range(len(limits))]
        for position in range(max(limits)):
            await self.gate.wait()
            await asyncio.sleep(0)
            for choice, limit in enumerate(limits):
                if position == self.fail_after:
                    generation.fail(self.error)
                    return
                if position < limit and generation not in self.closed:
                    generation.usage.completion_tokens += 1
                    last = position == limit - 1
                    generation.put(self._piece(request, choice, seeds[choice], position, last))

    def _piece(self, request: GenerateRequest, choice: int, seed: int, position: int, last: bool) -> Piece:
        word = words(seed, position + 1)[-1]
        details = None
        if request.want_tokens:
            top = request.params.logprobs or 0
            others = TopLogprobs(
                0, 0, position, tuple(1000 + (word + i) % 8 for i in range(top)), tuple(-0.5 - i for i in range(top))
            )
            details = TokenDetails([1000 + word], [-0.5], (others,) if top else ())
        return Piece(choice, WORDS[word], position + 1, self.finish if last else 0, None, details)


def make_app(service: FakeService, max_body_bytes: int = 100_000) -> ASGIApp:
    """The real app on the fake."""
    config = ServerConfig(
        model=ModelPart(served_model_name=f"{MODEL},alias", max_req_total_len=CONTEXT),
        http=HttpPart(max_body_bytes=max_body_bytes),
        facts=ModelFacts(vocab_size=VOCAB),
    )
    return create_app(service, config)


def run(service: FakeService, use: Callable[[httpx.AsyncClient], Awaitable[T]], **options: Any) -> T:
    """Run `use` with a client of an app on `service`."""

    async def inside() -> T:
        service.__post_init__()
        transport = httpx.ASGITransport(make_app(service, **options), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
            return await use(client)

    return asyncio.run(inside())


def ask(method: str, path: str, service: FakeService | None = None, **request: Any) -> httpx.Response:
    """One request to a fresh app."""
    return run(service or FakeService(), lambda client: client.request(method, path, **request))


def post(path: str, body: Any, service: FakeService | None = None) -> httpx.Response:
    """POST JSON to a fresh app."""
    return ask("POST", path, service, json=body)


def events(response: httpx.Response, prefix: str = "data: ") -> list[Any]:
    """Decoded SSE events, `[DONE]` as it is. Checks the framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    raw = response.content.decode()
    assert raw.endswith("\n\n")
    blocks = raw[:-2].split("\n\n")
    assert all(block.startswith(prefix) and len(block.splitlines()) == 1 for block in blocks), blocks
    return [b if (b := block[len(prefix) :]) == "[DONE]" else json.loads(b) for block in blocks]


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, checked."""
    assert response.status_code == status, response.text
    body = msgspec.json.decode(response.content)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]
