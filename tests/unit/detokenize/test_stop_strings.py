"""Stop strings against an oracle that sees the whole text (peers.md E01, E02)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.detokenize.stop_strings import StopAutomaton, StopFilter


def _filter(*stops: str, include: bool = False) -> StopFilter:
    return StopFilter(StopAutomaton(stops), include)


def _oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of those that end together."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, minus_length, stop = min(ends)
    return text[: end if include else end + minus_length], stop


def _run(stops: StopFilter, chunks: list[str]) -> tuple[list[str], str]:
    shown = []
    for chunk in chunks:
        shown.append(stops.push(chunk))
        if stops.matched is not None:
            return shown, ""
    return shown, stops.flush()


@given(
    chunks=st.lists(st.text("ab.", max_size=5), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_oracle(chunks: list[str], stops: list[str], include: bool) -> None:
    subject = _filter(*stops, include=include)
    shown, tail = _run(subject, chunks)
    text, stop = _oracle("".join(chunks), stops, include)
    assert ("".join(shown) + tail, subject.matched) == (text, stop)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    """After each character, what is held is exactly the longest tail that begins a stop string."""
    subject = _filter(*stops)
    shown = ""
    for n, char in enumerate(text, start=1):
        shown += subject.push(char)
        if subject.matched is not None:
            return
        seen = text[:n]
        tails = [k for k in range(n + 1) if any(s.startswith(seen[n - k :]) for s in stops)]
        assert shown == seen[: n - max(tails)]


def test_e01_across_tokens() -> None:
    stops = _filter("DEFGHIJ")
    assert _run(stops, ["A", "B", "C", "D", "EF", "GHI", "JKL"]) == (["A", "B", "C", "", "", "", ""], "")
    assert stops.matched == "DEFGHIJ"


@pytest.mark.parametrize("chunks", [["ABCDEF", "GHIJKL"], list("ABCDEFGHIJKL"), ["ABCDEFGHIJKL"]])
def test_e02_prefix_that_does_not_complete(chunks: list[str]) -> None:
    shown, tail = _run(_filter("EFX"), chunks)
    assert ("".join(shown), tail) == ("ABCDEFGHIJKL", "")


def test_e02_held_tail_is_flushed() -> None:
    assert _run(_filter("EFX"), ["ABCD", "EF"]) == (["ABCD", ""], "EF")


def test_include_stop_holds_nothing() -> None:
    stops = _filter("STOP", include=True)
    assert _run(stops, ["a S", "TO", "P and more"]) == (["a S", "TO", "P"], "")
    assert stops.matched == "STOP"


def test_stop_inside_another() -> None:
    """The shorter one is complete first, though the longer one began earlier."""
    assert _run(_filter("abcd", "bc"), list("xabcd"))[0] == ["x", "", "", "a"]


def test_hostile_strings_cost_nothing() -> None:
    """32 stop strings of 1,024 characters that nearly match all the time."""
    began = time.process_time()
    automaton = StopAutomaton(tuple("a" * 1000 + chr(0x4E00 + i) * 24 for i in range(32)))
    stops = StopFilter(automaton, False)
    for _ in range(5_000):
        stops.push("aaaa")
    assert stops.matched is None and stops.flush() == "a" * 1000
    assert time.process_time() - began < 2.0
