"""Answers of the OpenAI routes: SSE rules, usage, n, logprobs, errors in a stream, the real client (fake service)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from inferserve.errors import RequestFailed
from inferserve.protocol.messages import Finish
from inferserve.protocol.seeds import sibling_seed
from tests.fakes.http_service import MODEL, WORDS, FakeService, events, post, problem, run, text_of, words

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
TEXT = {"prompt": "hi", "max_tokens": 8, "seed": 3}
ROUTES = [(COMPLETIONS, TEXT), (CHAT, TALK)]


def joined(stream: list[Any], index: int = 0) -> str:
    out = ""
    for chunk in stream:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            if choice["index"] == index:
                out += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return out


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_stream_equals_whole(path: str, body: dict[str, Any]) -> None:
    whole = post(path, body).json()
    stream = events(post(path, body | {"stream": True}))
    assert stream.count("[DONE]") == 1 and stream[-1] == "[DONE]"
    text = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
    assert joined(stream) == text == text_of(3, 8)
    assert len(stream) == 8 + 1  # an event a token
    chunks = stream[:-1]
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (
            chunks[0]["id"],
            chunks[0]["created"],
            MODEL,
            "text_completion" if path == COMPLETIONS else "chat.completion.chunk",
        )
    }
    assert chunks[0]["id"].startswith("cmpl-" if path == COMPLETIONS else "chatcmpl-")
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * 7 + ["length"]
    assert all("usage" not in c for c in chunks)


def test_chat_role_comes_with_the_first_token_only() -> None:
    chunks = events(post(CHAT, TALK | {"stream": True}))[:-1]
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": WORDS[words(3, 1)[0]]}
    assert all("role" not in d for d in deltas[1:])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}], ids=str)
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_e07_no_usage_unasked(path: str, body: dict[str, Any], options: Any) -> None:
    for chunk in events(post(path, body | {"stream": True, "stream_options": options}))[:-1]:
        assert chunk["choices"] and "usage" not in chunk


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_e07_usage(path: str, body: dict[str, Any]) -> None:
    expected = post(path, body).json()["usage"]
    *chunks, usage, done = events(post(path, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == expected
    assert all(c["choices"] and c["usage"] is None for c in chunks)
    running = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(post(path, body | {"stream": True, "stream_options": running}))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert chunks[-1]["usage"] == expected


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_e29_n(path: str, body: dict[str, Any]) -> None:
    whole = post(path, body | {"n": 3}).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    texts = [c.get("text") or c["message"]["content"] for c in whole["choices"]]
    assert texts == [text_of(sibling_seed(3, i), 8) for i in range(3)]
    assert texts[0] == text_of(3, 8)
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == post(path, body).json()["usage"]["prompt_tokens"]
    stream = events(post(path, body | {"n": 3, "stream": True}))
    for index in range(3):
        assert joined(stream, index) == texts[index]
        mine = [c["choices"][0] for c in stream[:-1] if c["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        if path == CHAT:
            assert [c for c in mine if "role" in c["delta"]] == mine[:1]


def test_only_a_drawn_seed_is_numbered_over_prompts() -> None:
    service = FakeService()
    for fields in ({}, {"seed": -1}, {"seed": 4}, {"temperature": 0}):
        post(COMPLETIONS, {"prompt": ["a", "a"], "max_tokens": 1} | fields, service)
    assert [r.drawn_seed for r in service.requests] == [True, True, False, False]


def test_several_prompts() -> None:
    body = TEXT | {"prompt": ["a", "bc"], "n": 2, "add_special_tokens": False}
    whole = post(COMPLETIONS, body).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert whole["choices"][0]["text"] == whole["choices"][2]["text"]  # each prompt has its own siblings
    assert whole["usage"]["prompt_tokens"] == 3 and whole["usage"]["completion_tokens"] == 32
    ids = post(COMPLETIONS, TEXT | {"prompt": [[100], [101, 102]], "n": 2}).json()
    assert [c["text"] for c in ids["choices"]] == [c["text"] for c in whole["choices"]]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_stop_reason_and_finish_names(path: str, body: dict[str, Any]) -> None:
    for finish, name in ((Finish.STOP, "stop"), (Finish.LENGTH, "length")):
        assert post(path, body, FakeService(finish=finish)).json()["choices"][0]["finish_reason"] == name


def test_chat_logprobs() -> None:
    for top in (None, 0, 3):
        body = TALK | {"logprobs": True, "top_logprobs": top}
        whole = post(CHAT, body).json()["choices"][0]
        content = whole["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in content).decode() == whole["message"]["content"]
        assert [e["token"] for e in content] == [WORDS[w] for w in words(3, 8)]
        assert all(e["logprob"] == -0.5 and len(e["top_logprobs"]) == (top or 0) for e in content)
        stream = events(post(CHAT, body | {"stream": True}))[:-1]
        assert [e for c in stream for e in c["choices"][0]["logprobs"]["content"]] == content
    assert "top_logprobs" in problem(post(CHAT, TALK | {"top_logprobs": 5, "logprobs": False}), 400)["message"]
    assert post(CHAT, TALK).json()["choices"][0]["logprobs"] is None


def test_completion_logprobs() -> None:
    whole = post(COMPLETIONS, TEXT | {"logprobs": 2}).json()["choices"][0]
    found = whole["logprobs"]
    assert "".join(found["tokens"]) == whole["text"]
    assert found["token_logprobs"] == [-0.5] * 8
    assert [whole["text"][o:].startswith(t) for o, t in zip(found["text_offset"], found["tokens"], strict=True)]
    assert found["text_offset"][0] == 0
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert top[token] == -0.5 and len(top) == 2
    stream = events(post(COMPLETIONS, TEXT | {"logprobs": 2, "stream": True}))[:-1]
    parts = [c["choices"][0]["logprobs"] for c in stream]
    assert [o for p in parts for o in p["text_offset"]] == found["text_offset"]
    assert [t for p in parts for t in p["tokens"]] == found["tokens"]
    assert post(COMPLETIONS, TEXT | {"logprobs": 0}).json()["choices"][0]["logprobs"]["top_logprobs"] == [
        {WORDS[w]: -0.5} for w in words(3, 8)
    ]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_failure_before_the_first_token_is_a_status(path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        service = FakeService(fail_after=0)
        found = problem(post(path, body | {"stream": stream}, service), 500)
        assert found["message"] == "the row broke" and found["type"] == "server_error"
        assert len(service.closed) == 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_e34_failure_in_the_stream(path: str, body: dict[str, Any]) -> None:
    *chunks, error, done = events(post(path, body | {"stream": True}, FakeService(fail_after=3)))
    assert len(chunks) >= 1 and done == "[DONE]"
    assert error == {
        "error": {"message": "the row broke", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert problem(post(path, body, FakeService(fail_after=3)), 500)


def test_a_bug_in_a_stream_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    from inferserve.http.openai.chunks import Chunks

    def broken(self: Chunks, _: Any) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(Chunks, "end", broken)
    *_, error, done = events(post(CHAT, TALK | {"stream": True}))
    assert error["error"]["type"] == "server_error" and done == "[DONE]"


def test_line_separators_never_split_an_event() -> None:
    response = post(COMPLETIONS, TEXT | {"max_tokens": 60, "stream": True})
    assert "\u2028" in joined(events(response)) and "\u2028" not in response.text


def with_openai(service: FakeService, use: Any) -> Any:
    async def inside(client: httpx.AsyncClient) -> Any:
        sdk = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=client)
        return await use(sdk)

    return run(service, inside)


def test_real_client() -> None:
    async def use(sdk: openai.AsyncOpenAI) -> None:
        assert [m.id async for m in sdk.models.list()] == [MODEL, "alias"]
        assert (await sdk.models.retrieve("alias")).id == "alias"
        talk = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 6, "n": 2}
        whole = await sdk.chat.completions.create(**talk, logprobs=True, top_logprobs=2)
        assert [c.message.content for c in whole.choices] == [text_of(sibling_seed(5, i), 6) for i in range(2)]
        pieces = ["", ""]
        async for chunk in await sdk.chat.completions.create(
            **talk, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                pieces[choice.index] += choice.delta.content or ""
            usage = chunk.usage
        assert pieces == [c.message.content for c in whole.choices] and usage == whole.usage
        text = await sdk.completions.create(model=MODEL, prompt="a", seed=5, max_tokens=6)
        assert text.choices[0].text == text_of(5, 6) and text.object == "text_completion"

    with_openai(FakeService(), use)


def test_errors_become_named_classes() -> None:
    async def use(sdk: openai.AsyncOpenAI) -> None:
        talk: Any = {"messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(openai.NotFoundError, match="nope"):
            await sdk.chat.completions.create(model="nope", **talk)
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await sdk.chat.completions.create(model=MODEL, temperature=9, **talk)
        assert caught.value.param == "temperature" and caught.value.request_id
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("a/b")
        with pytest.raises(openai.InternalServerError):
            await sdk.chat.completions.create(model=MODEL, **talk)

    with_openai(FakeService(fail_after=0), use)

    async def stream(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIError, match="the row broke"):
            async for _ in await sdk.completions.create(model=MODEL, prompt="a", stream=True):
                pass

    with_openai(FakeService(fail_after=2, error=RequestFailed("the row broke")), stream)


def test_logprobs_are_finite_json() -> None:
    from inferserve.http.openai.logprobs import finite

    assert [finite(x) for x in (float("nan"), float("-inf"), -1e9, -1.5)] == [-9999.0, -9999.0, -9999.0, -1.5]
    assert json.dumps(finite(float("nan")), allow_nan=False)
