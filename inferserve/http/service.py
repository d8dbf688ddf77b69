"""`GenerationService`: all that the routes need of the server behind them, and the one that runs in this process tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from inferserve.config.schema import ServerConfig
from inferserve.errors import InvalidRequest, NotFound, TooLong
from inferserve.http.generation import GenerateRequest, Generation
from inferserve.http.live import LiveRequests
from inferserve.http.metrics_route import Scraper
from inferserve.http.prompts import ChatPrompt, PromptEncoder, TextTokenizer
from inferserve.http.serving import Serving
from inferserve.metrics.requests import RequestMetrics

_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bodies are checked against.

    Attributes:
        context: longest prompt plus output, tokens.
        vocab_size: ids lie in [0, vocab_size).
        max_n: largest `n`; max_sequences: rows that one request can ever have.
        model_names: names the model answers to; the first is the one reported.
        defaults: sampling fields of the model's generation_config.json.
    """

    context: int
    vocab_size: int
    max_n: int
    max_sequences: int
    model_names: tuple[str, ...]
    defaults: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ServerConfig) -> Limits:
        """The limits of a resolved configuration."""
        return cls(
            context=config.model.max_req_total_len,
            vocab_size=config.facts.vocab_size,
            max_n=config.http.max_n,
            max_sequences=config.slots_per_worker,
            model_names=config.model_names,
            defaults=config.facts.generation_defaults,
        )

    @property
    def model(self) -> str:
        """The name reported in answers."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raises NotFound for a model that is not served; None means the one that is."""
        if name is not None and name not in self.model_names:
            raise NotFound(
                f"The model `{name[:_MAX_SHOWN_CHARS]}` does not exist.", param="model", code="model_not_found"
            )

    def check_prompt(self, prompt: list[int], param: str) -> None:
        """A prompt needs a token, ids of the vocabulary, and room for one token of output.

        Raises InvalidRequest or TooLong naming `param`.
        """
        if not prompt:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        if len(prompt) > self.context - 1:
            raise TooLong(
                f"This model's context length is {self.context} tokens; the prompt has {len(prompt)} tokens,"
                f" and at most {self.context - 1} leave room for an answer.",
                param=param,
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InvalidRequest(f"{param} must hold token ids in [0, {self.vocab_size})", param=param)


class GenerationService(Protocol):
    """What routes call. A process with other neighbours brings another one; tests bring a fake."""

    limits: Limits
    serving: Serving

    @property
    def tokenizer(self) -> TextTokenizer:
        """For bytes and texts of single tokens."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Ids of a rendered chat."""

    def submit(self, request: GenerateRequest) -> Generation:
        """Start it. Raises a RequestError when it cannot be."""

    async def scrape(self) -> bytes:
        """The metrics page."""

    def refused(self, reason: str) -> None:
        """Count a request that was refused before it was submitted."""


class LocalService:
    """The service of an http worker among its neighbours: slots, router, detokenizer."""

    def __init__(
        self,
        limits: Limits,
        serving: Serving,
        prompts: PromptEncoder,
        live: LiveRequests,
        metrics: RequestMetrics,
        scraper: Scraper,
    ) -> None:
        self.limits = limits
        self.serving = serving
        self._prompts = prompts
        self._live = live
        self._metrics = metrics
        self._scraper = scraper

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's."""
        return self._prompts.tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; raises TooLong."""
        return await self._prompts.text(text, add_special_tokens)

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Ids of a rendered chat; raises InvalidRequest with the template's words, or TooLong."""
        return await self._prompts.chat(prompt)

    def submit(self, request: GenerateRequest) -> Generation:
        """Take rows and hand them to the router. Raises Overloaded, Unavailable or InvalidRequest."""
        if self.serving.stopping:
            raise self.serving.refusal() or AssertionError("stopping refuses")
        return self._live.open(request)

    async def scrape(self) -> bytes:
        """The metrics page; raises Unavailable."""
        return await self._scraper.scrape()

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._metrics.refused(reason)
