"""Joined deltas equal `tokenizer.decode` of all ids, for any ids and any decoder family (peers.md E05)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.config.schema import ModelFacts, ServerConfig
from inferserve.detokenize.incremental import REPLACEMENT, ByteLevelText, PieceText, TextStreams, WindowText
from inferserve.tokenize.load import Tokenizer, load_tokenizer
from tests.fakes.tiny_tokenizers import MAKERS, TEXTS

EXACT = ["byte_level", "sentencepiece", "unigram", "word_piece"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        kind: load_tokenizer(ServerConfig(facts=ModelFacts(folder=str(make(tmp_path_factory.mktemp(kind))))))
        for kind, make in MAKERS.items()
    }


def _deltas(streams: TextStreams, ids: list[int], skip: bool) -> list[str]:
    stream = streams.open(skip)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", EXACT)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_ids(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, skip: bool) -> None:
    """Random ids of the whole vocabulary and beyond it: broken characters, special tokens, byte runs."""
    tokenizer = tokenizers[kind]
    some = st.integers(0, tokenizer.vocab_size + 2)
    if kind == "sentencepiece":
        some |= st.integers(3, 258)  # byte tokens
    ids = data.draw(st.lists(some, max_size=40))
    assert "".join(_deltas(TextStreams(tokenizer), ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("skip", [True, False])
def test_real_texts(tokenizers: dict[str, Tokenizer], kind: str, skip: bool) -> None:
    """Texts that people write, cut after any token; no U+FFFD on the way when there is none in the end."""
    tokenizer = tokenizers[kind]
    streams = TextStreams(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip)
        if kind == "cleaning_unigram" and " ." in tokenizer.backend.decode(ids):
            continue  # a space that was shown cannot be taken back: the fallback is exact only inside its window
        deltas = _deltas(streams, ids, skip)
        assert "".join(deltas) == whole
        if REPLACEMENT not in whole:
            assert not any(REPLACEMENT in d for d in deltas)
        for cut in range(len(ids)):
            assert "".join(_deltas(streams, ids[:cut], skip)) == tokenizer.decode(ids[:cut], skip)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte_level", ByteLevelText),
        ("sentencepiece", PieceText),
        ("unigram", PieceText),
        ("word_piece", PieceText),
        ("cleaning_unigram", WindowText),
    ],
)
def test_kinds(tokenizers: dict[str, Tokenizer], kind: str, expected: type) -> None:
    assert isinstance(TextStreams(tokenizers[kind]).open(True), expected)


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes((b,))] for b in data]


def test_characters_split_over_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """One byte a token: each character comes whole, with its last byte."""
    tokenizer = tokenizers["byte_level"]
    text = "a😀ส你é"
    deltas = _deltas(TextStreams(tokenizer), _byte_ids(tokenizer, text.encode()), True)
    assert [d for d in deltas if d] == list(text)


def test_incomplete_and_invalid_are_told_apart(tokenizers: dict[str, Tokenizer]) -> None:
    """A byte that can never become a character is replaced at once; one that still may is held to the end."""
    tokenizer = tokenizers["byte_level"]
    stream = TextStreams(tokenizer).open(True)
    shown = [stream.push(i) for i in _byte_ids(tokenizer, b"\xffa\xf0\x9f\x98b\xe4\xbd")]
    assert shown == [REPLACEMENT, "a", "", "", "", REPLACEMENT + "b", "", ""]
    assert stream.flush() == REPLACEMENT


def test_run_of_byte_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """A run that is no UTF-8 has one U+FFFD a byte, as the library's ByteFallback decoder says."""
    tokenizer = tokenizers["sentencepiece"]
    good, bad = [3 + b for b in "你".encode()], [3 + 0xE4]
    word = tokenizer.encode("quick", add_special_tokens=False)
    for ids, text in [(good + word, "你 quick"), (good + bad + word, REPLACEMENT * 4 + " quick"), (good, "你")]:
        assert "".join(_deltas(TextStreams(tokenizer), ids, True)) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", MAKERS)
def test_no_work_that_grows_with_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """20,000 tokens, then again with hopeless bytes: both finish at once."""
    tokenizer = tokenizers[kind]
    streams = TextStreams(tokenizer)
    ids = tokenizer.encode("The quick brown fox ", add_special_tokens=False)
    broken = [tokenizer.vocab_size - 1] * 10
    began = time.process_time()
    _deltas(streams, (ids * 20_000)[:20_000], True)
    _deltas(streams, broken * 2_000, True)
    assert time.process_time() - began < 5.0
