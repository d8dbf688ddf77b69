"""Cases E01 to E29 of what clients of such servers report, streamed (S) and not (N), on a real model."""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar

import httpx
import pytest

from tests.e2e.requests import CHAT, COMPLETIONS, Body, both, chunks, events, post, streamed_text, text_of
from tests.e2e.server import RunningServer

PROMPT: Body = {"prompt": "The alphabet is A B C D E F G H I", "temperature": 0, "max_tokens": 24}
CHATTING: Body = {
    "messages": [{"role": "user", "content": "Name three colours."}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(params=["fake", pytest.param("model", marks=pytest.mark.real_model)], ids=["fake", "real"])
def server(request: pytest.FixtureRequest) -> RunningServer:
    if request.param == "model":
        return request.getfixturevalue("model_server")
    return request.getfixturevalue("fake_server")


def assert_alive(server: RunningServer) -> None:
    """A following plain request gives the same text as ever."""
    first = post(server, COMPLETIONS, PROMPT)
    assert first.status_code == 200
    assert text_of(first.json()) == text_of(post(server, COMPLETIONS, PROMPT).json())


def assert_problem(response: httpx.Response, status: int, param: str | None = None) -> Body:
    """An OpenAI error object with the right status; returns it."""
    assert response.status_code == status, response.text
    problem = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in an error body"))["error"]
    assert set(problem) == {"message", "type", "param", "code"} and problem["message"]
    if param is not None:
        assert param in f"{problem['param']} {problem['message']}", problem
    return problem


class TestStopStrings:
    def test_e01_stop_across_tokens(self, server: RunningServer) -> None:
        whole = text_of(post(server, COMPLETIONS, PROMPT).json())
        middle = len(whole) // 2
        stop = whole[middle : middle + 7]
        body = {**PROMPT, "stop": [stop]}
        answer, stream = both(server, COMPLETIONS, body)
        expected = whole[: whole.index(stop)]
        assert text_of(answer) == streamed_text(stream) == expected
        assert answer["choices"][0]["finish_reason"] == stream[-1]["choices"][0]["finish_reason"] == "stop"
        usage = chunks(server, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})[-1]["usage"]
        assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]

    def test_e02_a_prefix_that_does_not_complete(self, server: RunningServer) -> None:
        whole = text_of(post(server, COMPLETIONS, PROMPT).json())
        middle = len(whole) // 2
        for stop in (whole[middle : middle + 2] + "\u00a7", whole[-2:] + "\u00a7"):
            answer, stream = both(server, COMPLETIONS, {**PROMPT, "stop": [stop]})
            assert text_of(answer) == streamed_text(stream) == whole
            assert answer["choices"][0]["finish_reason"] == "length"

    def test_stop_string_can_be_kept(self, server: RunningServer) -> None:
        whole = text_of(post(server, COMPLETIONS, PROMPT).json())
        stop = whole[8:12]
        answer, stream = both(server, COMPLETIONS, {**PROMPT, "stop": stop, "include_stop_str_in_output": True})
        assert text_of(answer) == streamed_text(stream) == whole[: whole.index(stop) + len(stop)]


@pytest.mark.real_model
@pytest.mark.parametrize(
    "prompt",
    ["😀🎉🚀 😀🎉🚀 😀🎉🚀 😀🎉", "สวัสดี สวัสดี สวัสดี สวัส", "日本語 日本語 日本語 日本", "naïve café naïve café naïve"],
)
def test_e05_multi_byte_characters(model_server: RunningServer, prompt: str) -> None:
    answer, stream = both(model_server, COMPLETIONS, {"prompt": prompt, "temperature": 0, "max_tokens": 40})
    assert streamed_text(stream) == text_of(answer)
    deltas = [c["choices"][0]["text"] for c in stream]
    assert not any("\ufffd" in d for d in deltas[:-1])
    assert any(ord(c) > 127 for c in text_of(answer)), (
        "the model wrote no multi-byte character: the case proves nothing"
    )


class TestUsage:
    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}], ids=str)
    def test_e07_no_usage_unasked(self, server: RunningServer, options: Body | None) -> None:
        body = CHATTING if options is None else {**CHATTING, "stream_options": options}
        for chunk in chunks(server, CHAT, body):
            assert chunk["choices"] and not chunk.get("usage")

    def test_e07_usage_chunk(self, server: RunningServer) -> None:
        answer, stream = both(server, CHAT, {**CHATTING, "n": 2, "seed": 1} | {"stream": False})
        stream = chunks(server, CHAT, {**CHATTING, "n": 2, "seed": 1, "stream_options": {"include_usage": True}})
        empty = [c for c in stream if not c["choices"]]
        assert empty == [stream[-1]]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert stream[-1]["usage"][key] == answer["usage"][key]

    def test_e07_continuous_usage(self, server: RunningServer) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = chunks(server, CHAT, {**CHATTING, "stream_options": options})
        counts = [c["usage"]["completion_tokens"] for c in stream]
        assert (
            counts == sorted(counts) and counts[-1] == post(server, CHAT, CHATTING).json()["usage"]["completion_tokens"]
        )

    def test_e08_stream_options_without_stream(self, server: RunningServer) -> None:
        response = post(server, CHAT, {**CHATTING, "stream": False, "stream_options": {"include_usage": True}})
        assert_problem(response, 400, "stream_options")


class TestBadInput:
    @pytest.mark.parametrize("prompt", ["", [], [""], [[]]], ids=str)
    def test_e09_empty_prompts(self, server: RunningServer, prompt: Any) -> None:
        assert_problem(post(server, COMPLETIONS, {**PROMPT, "prompt": prompt}), 400, "prompt")
        assert_problem(post(server, CHAT, {**CHATTING, "messages": []}), 400, "messages")
        assert_alive(server)

    @pytest.mark.parametrize(("value", "status"), [(0, 400), (-1, 400), ("5", 400), (1.5, 400), (True, 400), (1, 200)])
    @pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
    def test_e10_max_tokens_edges(self, server: RunningServer, field: str, value: Any, status: int) -> None:
        body = {k: v for k, v in CHATTING.items() if k != "max_tokens"} | {field: value}
        response = post(server, CHAT, body)
        if status == 400:
            assert_problem(response, 400, field)
        else:
            assert response.json()["usage"]["completion_tokens"] == 1

    def test_e10_null_is_absent(self, server: RunningServer) -> None:
        absent = {k: v for k, v in PROMPT.items() if k != "max_tokens"}
        assert text_of(post(server, COMPLETIONS, {**absent, "max_tokens": None}).json()) == text_of(
            post(server, COMPLETIONS, absent).json()
        )

    def test_e10_huge_is_clipped_to_the_context(self, fake_server: RunningServer) -> None:
        limit = fake_server.client().get("/v1/models").json()["data"][0]["max_model_len"]
        body = {"prompt": [5] * (limit - 30), "max_tokens": 10**9, "temperature": 0}
        answer, stream = both(fake_server, COMPLETIONS, body)
        assert answer["usage"]["completion_tokens"] == 30
        assert streamed_text(stream) == text_of(answer)

    @pytest.mark.parametrize("ids", [[-1], [10**6], [2**31], [True], [1.0], [[1, -1]], [2**70]], ids=str)
    def test_e11_prompt_ids_out_of_range(self, server: RunningServer, ids: Any) -> None:
        assert_problem(post(server, COMPLETIONS, {**PROMPT, "prompt": ids}), 400, "prompt")
        assert_alive(server)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stop_token_ids", [10**6]),
            ("stop_token_ids", [-1]),
            ("logit_bias", {"1000000": 1}),
            ("logit_bias", {"AI": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"5": 101}),
        ],
        ids=str,
    )
    def test_e11_ids_of_parameters(self, server: RunningServer, field: str, value: Any) -> None:
        assert_problem(post(server, COMPLETIONS, {**PROMPT, field: value}), 400, field)
        assert_alive(server)

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
    @pytest.mark.parametrize(
        "field",
        [
            "temperature",
            "top_p",
            "top_k",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_p",
            "seed",
        ],
    )
    def test_e12_numbers_that_are_none(self, fake_server: RunningServer, field: str, number: str) -> None:
        raw = f'{{"prompt": "a", "{field}": {number}}}'
        with fake_server.client() as client:
            response = client.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
        assert_problem(response, 400)

    @pytest.mark.parametrize(
        ("field", "value", "ok"),
        [
            ("temperature", -0.1, False),
            ("temperature", 2.5, False),
            ("temperature", 2, True),
            ("top_p", 0, False),
            ("top_p", 1.5, False),
            ("top_k", 0, False),
            ("top_k", -2, False),
            ("top_k", -1, True),
            ("presence_penalty", -2, True),
            ("presence_penalty", -2.1, False),
            ("frequency_penalty", 2, True),
            ("frequency_penalty", 2.1, False),
            ("seed", -2, False),
            ("seed", 2**63, False),
            ("seed", 2**63 - 1, True),
            ("n", 0, False),
            ("n", 100000, False),
        ],
    )
    def test_e13_ranges(self, server: RunningServer, field: str, value: float, ok: bool) -> None:
        response = post(server, COMPLETIONS, {**PROMPT, "max_tokens": 2, field: value})
        if ok:
            assert response.status_code == 200, response.text
        else:
            assert_problem(response, 400, field)

    def test_e18_too_long(self, server: RunningServer) -> None:
        with server.client() as client:
            limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
        for stream in (False, True):
            body = {"prompt": [5] * (limit + 1), "max_tokens": 100, "stream": stream}
            problem = assert_problem(post(server, COMPLETIONS, body), 400, str(limit))
            assert problem["code"] == "context_length_exceeded" and str(limit + 1) in problem["message"]
        assert_problem(post(server, COMPLETIONS, {"prompt": [5] * limit}), 400)
        exact = post(server, COMPLETIONS, {"prompt": [5] * (limit - 1), "max_tokens": 100}).json()
        assert exact["usage"]["prompt_tokens"] == limit - 1 and exact["usage"]["completion_tokens"] == 1


class TestTemplates:
    def test_e22_content_forms(self, server: RunningServer) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
        assert text_of(post(server, CHAT, {**CHATTING, "messages": parts}).json()) == text_of(
            post(server, CHAT, CHATTING).json()
        )

    @pytest.mark.parametrize(
        "messages",
        [
            [{"role": "user", "content": None}],
            [{"role": "wizard", "content": "a"}],
            [{"role": "user"}],
            [{"content": "a"}],
            ["a"],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        ],
        ids=str,
    )
    def test_e22_refusals_are_400(self, server: RunningServer, messages: Any) -> None:
        assert_problem(post(server, CHAT, {**CHATTING, "messages": messages}), 400, "messages")

    def test_e22_two_user_messages_in_a_row(self, server: RunningServer) -> None:
        messages = [{"role": "user", "content": "Hi."}, {"role": "user", "content": "Name a colour."}]
        assert post(server, CHAT, {**CHATTING, "messages": messages}).status_code == 200

    def test_e23_shapes(self, server: RunningServer) -> None:
        with server.client() as client:
            headers = {"content-type": "application/json"}
            assert_problem(client.post(CHAT, content='{"messages": [', headers=headers), 400)
            assert_problem(client.post(CHAT, json={"max_tokens": 2}), 400, "messages")
            assert_problem(client.post(CHAT, json={**CHATTING, "messages": "hi"}), 400, "messages")
            assert_problem(client.post(CHAT, json={**CHATTING, "model": "no-such-model"}), 404, "no-such-model")
            assert_problem(client.get("/v1/nothing"), 404)
            assert_problem(client.get("/v1/models/no-such-model"), 404)
            assert_problem(client.put(CHAT, json=CHATTING), 405)

    def test_e24_extra_fields(self, server: RunningServer) -> None:
        extra = {
            "metadata": {"a": "b"},
            "user": "u",
            "store": False,
            "service_tier": "auto",
            "chat_id": "1",
            "stop": None,
            "tools": None,
            "logit_bias": {},
            "n": None,
        }
        assert text_of(post(server, CHAT, {**CHATTING, **extra}).json()) == text_of(post(server, CHAT, CHATTING).json())


class TestChoices:
    BODY: ClassVar[Body] = {**CHATTING, "n": 3, "temperature": 1, "seed": 7}

    def test_e29_n(self, server: RunningServer) -> None:
        answer, stream = both(server, CHAT, self.BODY)
        texts = [text_of(answer, i) for i in range(3)]
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert [streamed_text(stream, i) for i in range(3)] == texts
        assert len(set(texts)) > 1
        assert [text_of(post(server, CHAT, self.BODY).json(), i) for i in range(3)] == texts
        single = post(server, CHAT, {**self.BODY, "n": 1}).json()
        assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
        choices = [choice for chunk in stream for choice in chunk["choices"]]
        for index in range(3):
            mine = [c for c in choices if c["index"] == index]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [mine[-1]["finish_reason"]]
            assert [c for c in mine if c["delta"].get("role")] == [mine[0]]

    def test_stream_has_one_identity(self, server: RunningServer) -> None:
        stream = chunks(server, CHAT, self.BODY)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in stream}) == 1
        assert stream[0]["object"] == "chat.completion.chunk" and stream[0]["id"].startswith("chatcmpl-")
        texts = chunks(server, COMPLETIONS, PROMPT)
        assert texts[0]["object"] == "text_completion" and texts[0]["id"].startswith("cmpl-")

    def test_several_prompts(self, server: RunningServer) -> None:
        alone = [text_of(post(server, COMPLETIONS, {**PROMPT, "prompt": p}).json()) for p in ("One two", "Red green")]
        answer, stream = both(server, COMPLETIONS, {**PROMPT, "prompt": ["One two", "Red green"]})
        assert [text_of(answer, i) for i in range(2)] == alone == [streamed_text(stream, i) for i in range(2)]


def test_done_is_last_and_once(server: RunningServer) -> None:
    all_events = events(server, CHAT, CHATTING)
    assert all_events.count("[DONE]") == 1


def test_seed_does_not_depend_on_company(server: RunningServer) -> None:
    body = {**PROMPT, "temperature": 1.0, "seed": 11}
    alone = text_of(post(server, COMPLETIONS, body).json())
    crowd = post(server, COMPLETIONS, {**body, "prompt": [PROMPT["prompt"], "Red", "One two three", "In 1990"]}).json()
    assert text_of(crowd) == alone == text_of(post(server, COMPLETIONS, body).json())
    assert len(crowd["choices"]) == 4


@pytest.mark.real_model
def test_prefix_cache_is_reported(model_server: RunningServer) -> None:
    body = {"prompt": [7, 8, 9, 10] * 100, "max_tokens": 2, "temperature": 0}
    first = post(model_server, COMPLETIONS, body).json()
    again = post(model_server, COMPLETIONS, body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 399
    assert text_of(first) == text_of(again)


@pytest.mark.real_model
def test_greedy_is_stable_under_load(model_server: RunningServer) -> None:
    alone = text_of(post(model_server, COMPLETIONS, PROMPT).json())
    prompts = [PROMPT["prompt"], *itertools.repeat("Once upon a time", 7)]
    crowd = post(model_server, COMPLETIONS, {**PROMPT, "prompt": prompts}).json()
    assert text_of(crowd) == alone
