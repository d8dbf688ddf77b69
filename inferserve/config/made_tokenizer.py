"""A tokenizer for models that have none: every id is printable ASCII text, and every ASCII text can be encoded.

For `--load-format dummy`. Ids are the printable characters, then syllables ("ba"), then words of one, two and three
syllables with a space before them (" banado"), as many as the vocabulary has. Words are merged as in any byte-level BPE,
so text that was decoded from ids encodes to (nearly) as many ids again, and texts pass the same code as those of real
models. White space becomes a space; what is not ASCII becomes "?".
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from typing import Any

from inferserve.errors import ConfigError

MAKER_VERSION = "inferserve-made-tokenizer-1"
"""Raised when what is written changes."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_UNKNOWN = "?"
_SPACE = "Ġ"
"""How byte-level tokenizers spell a space (`bytes_to_unicode` of OpenAI's GPT-2 encoder)."""
_CHARACTERS = [_UNKNOWN, _SPACE, *(chr(c) for c in range(0x21, 0x7F) if chr(c) != _UNKNOWN)]
_SYLLABLES = [c + v for c, v in product("bcdfghjklmnpqrstvwxyz", "aeiou")]

Merge = tuple[str, str]


def _pieces() -> Iterator[Merge]:
    """What each token behind the characters is merged from. Only a consonant and a vowel, or what begins with a space
    and a syllable, ever merge: the order in which a text's pairs are merged makes no difference."""
    for syllable in _SYLLABLES:
        yield syllable[0], syllable[1]
    for syllable in _SYLLABLES:
        yield _SPACE, syllable
    for first, second in product(_SYLLABLES, repeat=2):
        yield _SPACE + first, second
    for first, second, third in product(_SYLLABLES, repeat=3):
        yield _SPACE + first + second, third


def made_tokenizer(vocab_size: int) -> dict[str, Any]:
    """The content of a tokenizer.json with exactly `vocab_size` ids, none of them special.

    Raises ConfigError for more ids than there are words (1.17 million).
    """
    merges = list(islice(_pieces(), max(0, vocab_size - len(_CHARACTERS))))
    tokens = [*_CHARACTERS[:vocab_size], *(left + right for left, right in merges)]
    if len(tokens) < vocab_size:
        raise ConfigError(f"--load-format dummy: a tokenizer of {vocab_size} ids cannot be made, {len(tokens)} can")
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"Regex": "[\\t\\n\\v\\f\\r]"}, "content": " "},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": _UNKNOWN,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
