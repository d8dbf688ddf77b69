"""`ChatTemplate`: render messages with a model's jinja template, as transformers does, in an immutable sandbox.

Templates are data from a model repository: they run without access to attributes that lead out of the sandbox, cannot
change what they are given, and are compiled once. Knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferserve.errors import ConfigError, InvalidRequest

MAX_RENDERED_CHARS = 64 * 2**20
_MAX_SHOWN_CHARS = 500


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 types it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body in a call that returns it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One compiled template. Thread-safe.

    Args:
        source: the jinja text.
        special_tokens: `bos_token` and so on, visible to the template.

    Raises ConfigError when the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"--chat-template: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: dictionaries with `role` and `content`.
            add_generation_prompt: end with the header of the assistant's turn.
            variables: `tools`, `documents`, and what the client gave in chat_template_kwargs.

        Raises InvalidRequest with the template's own words when it refuses the conversation or cannot take it.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(given)
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            # Python operations inside the template, on messages it was not written for.
            raise _refused(f"{type(error).__name__}: {error}") from error
        if len(text) > MAX_RENDERED_CHARS:
            raise _refused(f"more than {MAX_RENDERED_CHARS} characters")
        return text


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The chat template refuses these messages: {why[:_MAX_SHOWN_CHARS]}",
        param="messages",
        code="chat_template_refused",
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
