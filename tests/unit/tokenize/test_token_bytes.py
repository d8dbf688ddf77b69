"""Bytes of single tokens: joined, they are the text (peers.md E05, last clause)."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferserve.config.schema import ModelFacts, ServerConfig
from inferserve.tokenize.load import Tokenizer, load_tokenizer
from inferserve.tokenize.token_bytes import OpaqueTable, byte_alphabet, token_table
from tests.fakes.tiny_tokenizers import MAKERS, TEXTS


def _load(kind: str, folder: Path) -> Tokenizer:
    return load_tokenizer(ServerConfig(facts=ModelFacts(folder=str(MAKERS[kind](folder)))))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram", "word_piece"])
def test_joined_bytes_are_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = _load(kind, tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i, first=n == 0) for n, i in enumerate(ids))
        assert joined == tokenizer.decode(ids, skip_special_tokens=False).encode()


def test_parts_of_characters(tmp_path: Path) -> None:
    tokenizer = _load("sentencepiece", tmp_path)
    ids = [i for i in tokenizer.encode("𝔘", add_special_tokens=False) if tokenizer.token_bytes(i) != b" "]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes((b,)) for b in "𝔘".encode()]
    assert tokenizer.token_bytes(ids[0]).decode("utf-8", "replace") == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""


def test_alphabet_covers_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (0x20, 0x0A, 0x61)


def test_unknown_decoder_is_opaque(tmp_path: Path) -> None:
    from tokenizers import decoders

    backend = _load("sentencepiece", tmp_path).backend
    backend.decoder = decoders.Sequence([decoders.Strip(" ", 0, 1), decoders.Fuse()])
    assert isinstance(token_table(backend), OpaqueTable)
