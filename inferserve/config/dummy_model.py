"""`--load-format dummy`: a config.json is a whole model. Makes what else is needed: a tokenizer, an end token, a size.

A folder without a tokenizer is completed by a copy in the cache, under a key of its small files; nothing is ever written
to the user's folder. The weights themselves are drawn by the engine (`models/dummy_weights.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from inferserve.config import env
from inferserve.config.made_tokenizer import CHAT_TEMPLATE, MAKER_VERSION, made_tokenizer
from inferserve.config.model_config import ModelConfig
from inferserve.config.model_files import TOKENIZER_FILES, read_json
from inferserve.config.model_source import ModelSource, Report
from inferserve.errors import ConfigError

_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
_SUFFIXES = (".json", ".jinja", ".py")


def completed(source: ModelSource, report: Report) -> ModelSource:
    """`source` without weights, and with a tokenizer. Raises ConfigError for a config.json that describes no model."""
    source = replace(source, gguf=None, header=None)
    if any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        return source
    files = sorted(p for p in source.folder.iterdir() if p.suffix in _SUFFIXES and not p.name.endswith(".index.json"))
    digest = hashlib.sha256(MAKER_VERSION.encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = env.cache_dir() / "dummy" / digest.hexdigest()[:32]
    if not folder.is_dir():
        report(f"making a tokenizer for {source.name} (once)")
        _make(source.folder, files, folder)
    return replace(source, folder=folder)


def _make(origin: Path, files: list[Path], folder: Path) -> None:
    """Fill `folder`, which appears whole or not at all."""
    config = ModelConfig.from_json(read_json(origin / "config.json"))
    body = made_tokenizer(config.vocab_size)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder.parent}: cannot create the cache directory ({error.strerror})") from error
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        written.mkdir()
        for path in files:
            shutil.copyfile(path, written / path.name)
        (written / "tokenizer.json").write_text(json.dumps(body), "utf-8")
        (written / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG), "utf-8")
        generation = written / "generation_config.json"
        if not config.eos_ids and not generation.exists():
            # Something has to end a text, though nobody will wait for it: the last id.
            generation.write_text(json.dumps({"eos_token_id": config.vocab_size - 1}), "utf-8")
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another launcher was faster: its result is as good
                raise


def weight_count(config: ModelConfig) -> int:
    """How many weights a dense decoder of this shape has; other kinds have more, and their engine finds out."""
    size, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    attention = size * config.head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * size * config.intermediate_size + 2 * size
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * size + config.num_layers * layer + size
