"""`PromptEncoder`: texts and chats to token ids, off the event loop when they are long. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from inferserve.errors import InvalidRequest, TooLong
from inferserve.tokenize.chat import ChatTemplate

T = TypeVar("T")

# Encoding takes 0.26 us a character (measured): below this, less than what the hop to a thread would add to the first token.
INLINE_CHARS = 800
# No tokenizer in use has tokens that are longer on average; a text beyond this cannot fit and is not worth encoding.
MAX_CHARS_PER_TOKEN = 64
_THREADS = 2


class TextTokenizer(Protocol):
    """What is needed of a tokenizer; `tokenize.load.Tokenizer` has it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Raw bytes of one id, as the first of a text or inside it."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in the form that templates take.

    Attributes:
        messages: plain dictionaries with `role` and `content`.
        add_generation_prompt: end with the header of the assistant's turn.
        template_kwargs: further variables of the template.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)


class PromptEncoder:
    """Encodes for one worker.

    Args:
        tokenizer: thread-safe.
        template: None for a model without a chat template.
        context: longest prompt plus output, tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, context: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._context = context
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt")

    async def text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt. Raises TooLong for a text that cannot fit."""
        return await self._run(len(text), lambda: self._encode(text, add_special_tokens))

    async def chat(self, prompt: ChatPrompt) -> list[int]:
        """Ids of a rendered chat. Raises InvalidRequest with the template's words when it refuses, or TooLong."""
        template = self._template
        if template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        size = sum(len(m["content"]) if isinstance(m.get("content"), str) else INLINE_CHARS for m in prompt.messages)

        def render_and_encode() -> list[int]:
            text = template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                variables=prompt.template_kwargs,
            )
            # The template writes bos itself where the model wants one.
            return self._encode(text, add_special_tokens=False)

        return await self._run(size, render_and_encode)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, chars: int, work: Callable[[], T]) -> T:
        if chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > MAX_CHARS_PER_TOKEN * self._context:
            raise TooLong(
                f"This model's context length is {self._context} tokens, which a prompt of {len(text)} characters exceeds."
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
