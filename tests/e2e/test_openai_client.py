"""The real `openai` client against the server, with a real model and with the fake engine."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.server import RunningServer


@pytest.fixture(params=["fake", pytest.param("model", marks=pytest.mark.real_model)])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    server: RunningServer = request.getfixturevalue("fake_server" if request.param == "fake" else "model_server")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_chat_streamed_equals_unstreamed(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    joined = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert joined == whole.choices[0].message.content
    assert parts[-1].usage is not None and whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello."}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) <= 5
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode(errors="replace")
    assert (answer.choices[0].message.content or "").strip() in text
    for entry in logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3


def test_errors_map_to_named_classes(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    assert client.models.retrieve(model).id == model


def test_request_id_is_echoed(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    raw = client.completions.with_raw_response.create(
        model=model, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "trace-1"}
    )
    assert raw.headers["x-request-id"] == "trace-1"
