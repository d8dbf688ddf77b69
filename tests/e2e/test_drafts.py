"""Several tokens of a sequence in one step, through the whole server: what clients see is what they would see without.

The fake engine's tokens do not depend on the temperature, but only requests with temperature 0 are guessed for. Its
outputs repeat themselves, so guesses come true.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.requests import CHAT, COMPLETIONS, Body, both, chunks, post, streamed_text, text_of
from tests.e2e.server import RunningServer

TOKENS = 40
PLAIN: Body = {"prompt": "one two three", "seed": 5, "temperature": 1, "max_tokens": TOKENS}
GUESSED: Body = {**PLAIN, "temperature": 0}


@pytest.fixture(scope="module", params=["0", "1"], ids=["depth0", "depth1"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    flags = ("--spec-mode", "ngram", "--spec-tokens", "4", "--fake-period", "6", "--pipeline-depth", request.param)
    flags = (*flags, "--target-step-ms", "20")
    with RunningServer("--engine", "fake", "--fake-step-ms", "1", "--debug-checks", *flags) as started:
        assert "steps timed" in started.log()
        yield started


def counted(server: RunningServer) -> dict[str, float]:
    """Counters of guesses, sums over labels, of one moment."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found: dict[str, float] = {}
    for line in lines:
        name, value = line.partition("{")[0], line.rpartition(" ")[2]
        if name.startswith("inferserve_spec_decode_"):
            short = name.removeprefix("inferserve_spec_decode_num_").removesuffix("_total")
            found[short] = found.get(short, 0) + float(value)
    return found


def test_text_and_usage_are_the_same_in_fewer_events(server: RunningServer) -> None:
    usual = post(server, COMPLETIONS, PLAIN).json()
    answer, stream = both(server, COMPLETIONS, GUESSED)
    assert text_of(answer) == streamed_text(stream) == text_of(usual)
    assert answer["usage"]["completion_tokens"] == usual["usage"]["completion_tokens"] == TOKENS
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(stream) < TOKENS < len(chunks(server, COMPLETIONS, PLAIN)) + 3


def test_siblings(server: RunningServer) -> None:
    chat: Body = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 25, "n": 3}
    usual = post(server, CHAT, {**chat, "temperature": 1}).json()
    guessed, stream = both(server, CHAT, {**chat, "temperature": 0})
    for i in range(3):
        assert text_of(guessed, i) == text_of(usual, i) == streamed_text(stream, i)


@pytest.mark.parametrize("start", range(8, 60, 3))
def test_stop_strings_inside_guesses(server: RunningServer, start: int) -> None:
    """A period is some thirty characters long: what is cut out of it ends at every place of a guess."""
    whole = text_of(post(server, COMPLETIONS, PLAIN).json())
    unique = {**GUESSED, "stop": [whole[start : start + 5]]}
    guessed, stream = both(server, COMPLETIONS, unique)
    usual = post(server, COMPLETIONS, {**unique, "temperature": 1}).json()
    assert text_of(guessed) == streamed_text(stream) == text_of(usual)
    assert guessed["usage"]["completion_tokens"] == usual["usage"]["completion_tokens"]
    assert guessed["choices"][0]["finish_reason"] == usual["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("limit", range(1, 14))
def test_limits_inside_guesses(server: RunningServer, limit: int) -> None:
    guessed = post(server, COMPLETIONS, {**GUESSED, "max_tokens": limit}).json()
    assert guessed["usage"]["completion_tokens"] == limit
    assert text_of(guessed) == text_of(post(server, COMPLETIONS, {**PLAIN, "max_tokens": limit}).json())


def test_logprobs_are_not_guessed_for(server: RunningServer) -> None:
    answer = post(server, COMPLETIONS, {**GUESSED, "logprobs": 2}).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == TOKENS
    assert text_of(answer) == text_of(post(server, COMPLETIONS, PLAIN).json())


def test_metrics_count_guesses(server: RunningServer) -> None:
    post(server, COMPLETIONS, GUESSED)
    counts = counted(server)
    assert 0 < counts["drafts"] <= counts["draft_tokens"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["accepted_tokens_per_pos"] == counts["accepted_tokens"]
