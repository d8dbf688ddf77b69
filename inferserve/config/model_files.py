"""Reading a model folder's small files: config.json, generation_config.json and what the tokenizer says of its ids.

Everything that is wrong with a model and shows without loading weights is found here, before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferserve.config.model_config import ModelConfig
from inferserve.config.model_source import ModelSource
from inferserve.config.weights import WeightFacts, check_weights
from inferserve.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
# Sampling fields of generation_config.json that requests fall back to.
_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFiles:
    """What the files say. `eos_ids` are those of config and generation config together; `weights` None if unread."""

    config: ModelConfig
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    weights: WeightFacts | None


class _Added(msgspec.Struct):
    id: int
    content: str = ""


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = []


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_Added] = []


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file."""
    try:
        loaded = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return loaded


def read_model(source: ModelSource, *, with_weights: bool, eos_given: bool) -> ModelFiles:
    """Read and check a model's files. Raises one ConfigError with every problem found.

    Args:
        source: where they are.
        with_weights: verify the weight files as well (an engine without weights does not need them).
        eos_given: the user named eos ids, so the model need not.
    """
    problems: list[str] = []
    raw = read_json(source.folder / "config.json")
    config: ModelConfig | None = None
    try:
        config = ModelConfig.from_json(raw)
    except ConfigError as error:
        problems += [f"{source.gguf or source.folder}: {line}" for line in error.problems]
    generation: dict[str, Any] = {}
    if (source.folder / "generation_config.json").is_file():
        generation = read_json(source.folder / "generation_config.json")
    weights: WeightFacts | None = None
    if with_weights:
        try:
            weights = _weights(source)
        except ConfigError as error:
            problems += error.problems
    tokenizer: _Tokenizer | None = None
    try:
        tokenizer = _read_tokenizer(source.folder)
    except ConfigError as error:
        problems += error.problems
    eos = _eos_ids(config, generation, tokenizer, source.folder)
    if config is not None:
        problems += _check_ids(source, config, weights, tokenizer, () if eos_given else eos)
    if not eos and not eos_given:
        problems.append(
            f"{source.folder}: no end-of-text token in config.json or generation_config.json; give --eos-id"
        )
    if problems or config is None:
        raise ConfigError(*problems)
    return ModelFiles(config, eos, _generation_defaults(generation), weights)


def _weights(source: ModelSource) -> WeightFacts:
    if source.header is None:
        return check_weights(source.folder)
    embedding = source.header.shapes.get("token_embd.weight", (0, 0))
    return WeightFacts(source.header.elements, embedding[-1])


def _read_tokenizer(folder: Path) -> _Tokenizer | None:
    """Ids of tokenizer.json; None when the tokenizer is in another format, whose loader will speak for itself."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(f"{folder}: no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])})")
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _token_count(tokenizer: _Tokenizer) -> int:
    """One more than the largest id the tokenizer can produce."""
    vocab = tokenizer.model.vocab
    largest = (max(vocab.values(), default=-1)) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + max([largest, *(added.id for added in tokenizer.added_tokens)])


def _check_ids(
    source: ModelSource,
    config: ModelConfig,
    weights: WeightFacts | None,
    tokenizer: _Tokenizer | None,
    eos: tuple[int, ...],
) -> list[str]:
    rows = config.vocab_size
    problems = []
    if weights is not None and weights.embedding_rows and weights.embedding_rows != rows:
        problems.append(
            f"{source.folder}: config.json says vocab_size {rows}, the embeddings have {weights.embedding_rows} rows"
        )
        rows = min(rows, weights.embedding_rows)
    if tokenizer is not None and _token_count(tokenizer) > rows:
        problems.append(
            f"{source.folder / 'tokenizer.json'}: does not match the model: it has {_token_count(tokenizer)} token ids,"
            f" the model's embeddings only {rows}"
        )
    problems += [f"{source.folder}: eos id {i} is outside the vocabulary of {rows}" for i in eos if not 0 <= i < rows]
    return problems


def _eos_ids(
    config: ModelConfig | None, generation: Mapping[str, Any], tokenizer: _Tokenizer | None, folder: Path
) -> tuple[int, ...]:
    """Union of both files' ids, config first; else the tokenizer's own eos token."""
    named = generation.get("eos_token_id")
    more = named if isinstance(named, list) else [named]
    ids = [*(config.eos_ids if config else ()), *(i for i in more if isinstance(i, int) and not isinstance(i, bool))]
    if not ids and tokenizer is not None and (folder / "tokenizer_config.json").is_file():
        token = read_json(folder / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        ids = [added.id for added in tokenizer.added_tokens if added.content == text]
    return tuple(dict.fromkeys(ids))


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling defaults a request falls back to: `do_sample` is 1 or 0; transformers' `top_k` 0 (off) is our -1."""
    found: dict[str, float] = {}
    sample = generation.get("do_sample")
    if isinstance(sample, bool):
        found["do_sample"] = float(sample)
    for name in _GENERATION_FIELDS:
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = -1.0 if name == "top_k" and value == 0 else float(value)
    return found
