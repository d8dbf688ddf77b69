"""Load a model's tokenizer without torch or transformers: `tokenizer.json` through the `tokenizers` library.

What transformers' `PreTrainedTokenizerFast` adds on top of that file (added tokens of tokenizer_config.json, named
special tokens, chat template files, no truncation) is done here in the same order, so ids and texts are equal.
transformers itself, and torch with it, is imported only for folders without a tokenizer.json and for tokenizers that
come as Python code. Knows nothing of requests, slots or models.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from inferserve.config.schema import ModelFacts, ServerConfig
from inferserve.errors import ConfigError
from inferserve.log import event
from inferserve.tokenize.token_bytes import OpaqueTable, TokenTable, token_table

log = logging.getLogger(__name__)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHORT = 2048
"""Characters that take well under a millisecond to encode."""

_CLEANUPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    *((f" {suffix}", suffix) for suffix in ("n't", "'m", "'s", "'ve", "'re")),
)


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. Safe to use from several threads; `encode` of a long text releases the GIL.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        table: text and bytes of single ids.
        eos_ids: ids that end a text, `--eos-id` first of all.
        bos_id: id of the begin token, None if there is none.
        special_ids: ids that `decode(skip_special_tokens=True)` leaves out.
        chat_template: jinja source, None if the model has none.
        special_tokens_map: `bos_token` → `<s>` and so on, for chat templates.
        cleans_up: whether decoded text loses the spaces before punctuation (never for BPE).
    """

    backend: Any
    table: TokenTable
    eos_ids: tuple[int, ...]
    bos_id: int | None
    special_ids: frozenset[int]
    chat_template: str | None
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    cleans_up: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` lets the post-processor add bos and eos."""
        if len(text) < _SHORT:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The batch call releases the GIL, at the price of a hop to a thread of the library.
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self.cleans_up else text

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Raw bytes of one id inside a text (for some only a part of a character), b'' if unknown.

        `first`: as the first token of a text, where sentencepiece tokenizers drop a leading space.
        """
        return self.table.token_bytes(token_id, first)


@dataclass(frozen=True)
class PythonTokenizer(Tokenizer):
    """A tokenizer that exists only as Python code in transformers or beside the model; `backend` is its object."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Holds the GIL."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))


def clean_up_spaces(text: str) -> str:
    """Spaces before punctuation and English contractions removed (transformers' `clean_up_tokenization`)."""
    for old, new in _CLEANUPS:
        text = text.replace(old, new)
    return text


def load_tokenizer(config: ServerConfig) -> Tokenizer:
    """The tokenizer of `config.facts.folder`. Raises ConfigError naming the file or flag."""
    folder = Path(config.facts.folder)
    mode = config.model.tokenizer_mode
    settings = _read_json(folder / "tokenizer_config.json")
    has_file = (folder / "tokenizer.json").is_file()
    if mode == "fast" and not has_file:
        raise ConfigError(f"--tokenizer-mode fast needs {folder / 'tokenizer.json'}, which does not exist")
    remote_code = config.model.trust_remote_code and "auto_map" in settings
    template = _chosen_template(config.model.chat_template) or _model_template(folder, settings)
    if has_file and mode != "slow" and not (remote_code and mode == "auto"):
        return _from_file(folder, settings, config, template)
    if not folder.is_dir():
        raise ConfigError(f"--model-dir: {folder} is not a folder")
    return _from_transformers(folder, config, template)


def check_tokenizer(tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """Refuse a tokenizer that does not belong to the model.

    Raises ConfigError naming both numbers when the tokenizer makes ids for which the model has no embedding, and when
    no token ends a text.
    """
    problems = []
    if tokenizer.vocab_size > facts.vocab_size:
        problems.append(
            f"--model-dir: the tokenizer has {tokenizer.vocab_size} tokens, the model only {facts.vocab_size} embeddings"
        )
    if not tokenizer.eos_ids:
        problems.append("--eos-id: the tokenizer names no eos token; give the ids that end a text")
    beyond = [i for i in tokenizer.eos_ids if not 0 <= i < facts.vocab_size]
    if beyond:
        problems.append(f"--eos-id: {beyond[0]} is outside the model's {facts.vocab_size} embeddings")
    if problems:
        raise ConfigError(*problems)


def _from_file(folder: Path, settings: dict[str, Any], config: ServerConfig, template: str | None) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a file it cannot read
        raise ConfigError(f"{path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    named = _named_tokens(folder, settings)
    _add_missing_tokens(backend, settings, named.values(), config.facts.vocab_size or 2**31)
    names = {name: _content(token) for name, token in named.items()}
    bpe = type(backend.model).__name__ == "BPE"
    return Tokenizer(
        backend=backend,
        table=token_table(backend),
        eos_ids=config.model.eos_id or _known_ids(backend, [names.get("eos_token")]),
        bos_id=next(iter(_known_ids(backend, [names.get("bos_token")])), None),
        special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        chat_template=template,
        special_tokens_map=names,
        cleans_up=bool(settings.get("clean_up_tokenization_spaces", False)) and not bpe,
    )


def _from_transformers(folder: Path, config: ServerConfig, template: str | None) -> Tokenizer:
    """The slow way: imports transformers, and torch if it is installed."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # model code may raise anything
        hint = "" if config.model.trust_remote_code else " (does it need --trust-remote-code?)"
        raise ConfigError(f"--model-dir: no tokenizer in {folder}{hint}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    kind = PythonTokenizer if backend is None else Tokenizer
    bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return kind(
        backend=backend or tokenizer,
        table=token_table(backend) if backend is not None else OpaqueTable(tokenizer.decode),
        eos_ids=config.model.eos_id or eos,
        bos_id=tokenizer.bos_token_id,
        special_ids=frozenset(tokenizer.all_special_ids),
        chat_template=template,
        special_tokens_map=dict(tokenizer.special_tokens_map),
        cleans_up=backend is not None and bool(tokenizer.clean_up_tokenization_spaces) and not bpe,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str | dict[str, Any]]:
    """bos_token … mask_token. special_tokens_map.json counts only where the newer `added_tokens_decoder` is absent."""
    source = dict(settings)
    if "added_tokens_decoder" not in settings:
        source.update(_read_json(folder / "special_tokens_map.json"))
    return {name: source[name] for name in NAMED_TOKENS if source.get(name) is not None}


def _add_missing_tokens(
    backend: Any, settings: dict[str, Any], named: Iterable[str | dict[str, Any]], embeddings: int
) -> None:
    """Tokens that the settings name and tokenizer.json lacks (or flags differently), in transformers' order.

    New ones stop at `embeddings`: fine-tunes often name a pad token that nothing uses and the model has no row for.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted = []
    declared = settings.get("added_tokens_decoder", {})
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        added = _added_token(token)
        if repr(known.get(added.content)) != repr(added):
            wanted.append(added)
            known[added.content] = added
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    for token in (*named, *(extra.values() if isinstance(extra, dict) else extra)):
        if _content(token) not in known:
            wanted.append(_added_token(token, special=True))
            known[_content(token)] = wanted[-1]
    for added in wanted:
        if backend.token_to_id(added.content) is not None or backend.get_vocab_size() < embeddings:
            backend.add_tokens([added])
        else:
            event(log, "token without embedding left out", logging.WARNING, token=added.content)


def _added_token(token: str | dict[str, Any], **flags: bool) -> Any:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, **flags)
    fields = {k: v for k, v in token.items() if k not in ("__type", "content")}
    return tokenizers.AddedToken(token["content"], **{**fields, **flags})


def _known_ids(backend: Any, tokens: Iterable[str | None]) -> tuple[int, ...]:
    ids = (backend.token_to_id(token) for token in tokens if token is not None)
    return tuple(i for i in ids if i is not None)


def _chosen_template(path: str) -> str | None:
    """The file of `--chat-template`."""
    if not path:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {error}") from error


def _model_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The model's own: chat_template.jinja wins over tokenizer_config.json; of several named ones, `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template
