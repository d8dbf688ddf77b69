"""Fields that this server does not do and that would change the answer: refused by name instead of ignored.

A field passes with a value that asks for nothing (null, empty, or what is listed here). Knows no pydantic model, so
what is refused does not show in the API's documentation as something that exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferserve.errors import InvalidRequest

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
# Of what is on for everybody, being on asks for nothing and being off does.
_ON = (True,)

COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "echo": (),
    "suffix": (),
    "use_beam_search": (),
    "prompt_embeds": (),
}
CHAT: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "functions": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "continue_final_message": (),
    "chat_template": (),
    "documents": (),
    "role_settings": (),
    "character_settings": (),
    "web_search_options": (),
}
BOTH: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": _ON,
    "add_spaces_between_special_tokens": _ON,
}


def check(body: Mapping[str, Any], *tables: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises InvalidRequest naming the first field of `tables` that asks for something."""
    for table in (*tables, BOTH):
        for name, harmless in table.items():
            value = body.get(name)
            if value is None or (not isinstance(value, int) and value in _NOTHING):
                continue
            if value is False and harmless != _ON:
                continue
            if value not in harmless:
                raise InvalidRequest(f"{name} is not supported by this server", param=name, code="unsupported_field")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise InvalidRequest("best_of is not supported unless it equals n", param="best_of", code="unsupported_field")
