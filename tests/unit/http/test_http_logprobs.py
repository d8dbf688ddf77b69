"""Logprob lists match the text: held-back, cut and silent tokens; streamed parts join to the whole; memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferserve.http import streams
from inferserve.http.generation import Piece, TokenDetails
from inferserve.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from inferserve.protocol.messages import Finish
from tests.fakes.http_service import BYTES_FROM, ByteTokenizer, FakeService, post, problem

EOS = 2


class Strips(ByteTokenizer):
    """Drops a leading space of the text, as sentencepiece tokenizers do."""

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        raw = super().token_bytes(token_id)
        return raw.removeprefix(b" ") if first else raw


def ids_of(text: str) -> list[int]:
    return [BYTES_FROM + b for b in text.encode()]


def pieces_of(steps: list[tuple[list[int], str]], finish: Finish, stop_reason: str | int | None = None) -> list[Piece]:
    """A piece for each (new ids, new text)."""
    out, count = [], 0
    for number, (ids, text) in enumerate(steps):
        count += len(ids)
        last = number == len(steps) - 1
        details = TokenDetails(ids, [-1.0] * len(ids))
        out.append(Piece(0, text, count, finish if last else 0, stop_reason if last else None, details))
    return out


def shown(pieces: list[Piece], tokenizer: ByteTokenizer | None = None) -> list[str]:
    """Texts of the tokens that each piece shows, as both shapes say."""
    texts = TokenTexts(tokenizer or ByteTokenizer(), True, 0)
    chat, completion = ChatLogprobs(texts), CompletionLogprobs(texts)
    out = []
    for piece in pieces:
        entries, lists = chat.part(piece)["content"], completion.part(piece)
        assert [e["token"] for e in entries] == lists["tokens"]
        assert len(set(map(len, lists.values()))) == 1
        out.append("".join(lists["tokens"]))
    return out


def test_tokens_come_with_their_text() -> None:
    steps = [(ids_of("ab"), "ab"), (ids_of("c"), ""), (ids_of("d"), "cd"), (ids_of("e"), "e")]
    assert shown(pieces_of(steps, Finish.LENGTH)) == ["ab", "", "cd", "e"]


def test_a_stop_string_cuts_tokens() -> None:
    steps = [(ids_of("ab"), "a"), (ids_of("c"), ""), (ids_of("d"), "b")]
    assert shown(pieces_of(steps, Finish.STOP, "cd")) == ["a", "", "b"]
    assert shown(pieces_of([(ids_of("abc"), "")], Finish.STOP, "abc")) == [""]


def test_a_token_that_is_cut_inside_stays() -> None:
    word = 1000  # " alpha"
    assert shown(pieces_of([([word], " al")], Finish.STOP, "pha")) == [" alpha"]


def test_a_stop_token_stays_only_if_it_is_no_text() -> None:
    assert shown(pieces_of([(ids_of("a"), "a"), ([EOS], "")], Finish.STOP)) == ["a", "<s>"]
    assert shown(pieces_of([(ids_of("a"), "a"), (ids_of("b"), "")], Finish.STOP, BYTES_FROM + 98)) == ["a", ""]


def test_characters_of_several_tokens() -> None:
    first, second = ids_of("é")
    pieces = pieces_of([([first], ""), ([second], "é"), ([first], "\ufffd")], Finish.LENGTH)
    entries = [ChatLogprobs(TokenTexts(ByteTokenizer(), True, 0)).part(p)["content"] for p in pieces[:1]]
    assert entries == [[]]
    chat = ChatLogprobs(TokenTexts(ByteTokenizer(), True, 0))
    parts = [chat.part(p)["content"] for p in pieces]
    assert [bytes(b for e in part for b in e["bytes"]) for part in parts] == [b"", "é".encode(), b"\xc3"]


def test_a_dropped_leading_space_shifts_nothing() -> None:
    steps = [(ids_of(" "), ""), (ids_of("a"), "a"), (ids_of("b"), "b")]
    assert shown(pieces_of(steps, Finish.STOP, "x"), Strips()) == ["", " a", "b"]
    lists = CompletionLogprobs(TokenTexts(Strips(), True, 0))
    offsets = [o for p in pieces_of(steps, Finish.LENGTH) for o in lists.part(p)["text_offset"]]
    assert offsets == [0, 0, 1]


@given(st.lists(st.text("aé😀", max_size=4), min_size=1, max_size=6), st.data())
def test_bytes_of_what_is_shown_are_the_text(parts: list[str], data: st.DataObject) -> None:
    """However tokens and text are cut into pieces, and wherever a stop string cut the text between characters."""
    ids, text = ids_of("".join(parts)), "".join(parts)
    kept = text[: data.draw(st.integers(0, len(text)))]
    pieces, taken, given_ = [], 0, 0
    while taken < len(ids):
        new = data.draw(st.integers(1, len(ids) - taken))
        taken += new
        last = taken == len(ids)
        complete = len(bytes(i - BYTES_FROM for i in ids[:taken]).decode(errors="ignore"))
        upto = len(kept) if last else data.draw(st.integers(given_, max(given_, min(complete, len(kept)))))
        details = TokenDetails(ids[taken - new : taken], [-1.0] * new)
        pieces.append(Piece(0, kept[given_:upto], taken, Finish.STOP if last else 0, "stop" if last else None, details))
        given_ = upto
    chat = ChatLogprobs(TokenTexts(ByteTokenizer(), True, 0))
    entries = [entry for piece in pieces for entry in chat.part(piece)["content"]]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == kept


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
        ("/generate", {"inputs": "a", "parameters": {"return_details": True, "max_new_tokens": 16}}),
    ],
)
def test_unstreamed_lists_are_bounded(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> None:
    service = FakeService()
    assert post(path, body, service).status_code == 200
    monkeypatch.setattr(streams, "MAX_DETAILS_BYTES", 300)
    assert problem(post(path, body, service), 400)["code"] == "answer_too_large"
    assert len(service.closed) == len(service.requests)
    streamed = "/generate_stream" if path == "/generate" else path
    assert post(streamed, body | {"stream": True}, service).status_code == 200
