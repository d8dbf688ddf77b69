"""What bodies the routes take and refuse (E08 to E13, E18, E22 to E24 of the client reports), on the fake service."""

from __future__ import annotations

from typing import Any

import pytest

from inferserve.errors import Overloaded, RequestFailed, Unavailable
from tests.fakes.http_service import CONTEXT, MODEL, VOCAB, FakeService, ask, post, problem

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEXT = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
TALK = {"messages": HELLO, "max_tokens": 3, "temperature": 0}


def both(extra: dict[str, Any]) -> list[Any]:
    """Answers of both routes to bodies with `extra`."""
    return [post(COMPLETIONS, TEXT | extra), post(CHAT, TALK | extra)]


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_e08_stream_options_need_a_stream(options: dict[str, Any]) -> None:
    for answer in both({"stream_options": options}) + both({"stream_options": options, "stream": False}):
        assert problem(answer, 400)["param"] == "stream_options"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]], ids=str)
def test_e09_empty_prompts(prompt: Any) -> None:
    assert problem(post(COMPLETIONS, TEXT | {"prompt": prompt}), 400)["param"] == "prompt"


def test_e09_no_messages() -> None:
    assert problem(post(CHAT, TALK | {"messages": []}), 400)["param"] == "messages"


@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True, 2**31, [5]], ids=str)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_e10_bad_max_tokens(field: str, value: Any) -> None:
    for answer in both({field: value}):
        assert problem(answer, 400)["param"] == field


def test_e10_absent_and_null_max_tokens() -> None:
    for extra in ({}, {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}):
        answer = post(COMPLETIONS, {"prompt": "hi", "temperature": 0} | extra)
        assert answer.json()["usage"]["completion_tokens"] == 16
        answer = post(CHAT, {"messages": HELLO, "temperature": 0} | extra).json()
        assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("stream", [False, True])
def test_e10_huge_max_tokens_is_clipped(stream: bool) -> None:
    service = FakeService()
    body = {"prompt": [5] * 100, "max_tokens": 10**9, "stream": stream}
    assert post(COMPLETIONS, body, service).status_code == 200
    assert service.closed[0].usage.completion_tokens == CONTEXT - 100


def test_max_completion_tokens_goes_first() -> None:
    for answer in both({"max_tokens": 9, "max_completion_tokens": 2}):
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [2**31], [True], [1.0], [1, None], [[1], 2], [[1, -1]], {}, 5], ids=str)
def test_e11_prompt_ids(ids: Any) -> None:
    assert problem(post(COMPLETIONS, TEXT | {"prompt": ids}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", list(range(257))),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"AI": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]),
        ("stop", ["a"] * 33),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", ["x" * 1025]),
    ],
    ids=lambda v: str(v)[:30],
)
def test_e11_ids_and_stops(field: str, value: Any) -> None:
    for answer in both({field: value}):
        assert field in (problem(answer, 400)["param"] or "")


RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 2, 2.0, 0.5, 1], [-0.1, 2.5, "1", True, [1]]),
    "top_p": ([0.01, 1, 1.0], [0, 1.5, -0.1, True]),
    "top_k": ([-1, 1, 5], [0, -2, 1.0, "1", False]),
    "min_p": ([0, 1, 0.3], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2, 0], [-2.1, 2.1, "0"]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.01, 1, 100], [0, 1e-320, 0.009, -1, 101]),
    "seed": ([-1, 0, 2**63 - 1], [-2, 2**63, 1.5, "7"]),
    "n": ([1, 4], [0, -1, 5, 100000, 1.0, True]),
    "min_tokens": ([0, 3], [-1, 4, 1.0]),
    "ignore_eos": ([True, False], [1, "true"]),
    "stream": ([False], [1, "false"]),
}


@pytest.mark.parametrize("field", RANGES)
def test_e13_ranges(field: str) -> None:
    good, bad = RANGES[field]
    for value in [*good, None]:
        for answer in both({field: value}):
            assert answer.status_code == 200, (value, answer.text)
    for value in bad:
        for answer in both({field: value}):
            assert problem(answer, 400)["param"] == field, value


def test_values_reach_the_params_unchanged() -> None:
    service = FakeService()
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "seed": 11,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "logit_bias": {"7": -100},
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
    }
    post(CHAT, TALK | fields, service)
    params = service.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 1.5, 1.1)
    assert (params.seed, params.min_tokens, params.max_tokens) == (11, 2, 3)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x", "y"), (4,), {7: -100})
    assert params.ignore_eos and params.include_stop and params.logprobs is None
    assert not params.skip_special_tokens


def test_seeds_are_random_but_not_for_greedy_requests() -> None:
    service = FakeService()
    for temperature in (1, 1, 0, 0):
        post(COMPLETIONS, TEXT | {"temperature": temperature}, service)
    a, b, c, d = (r.params.seed for r in service.requests)
    assert a != b and c == d == 0


def test_defaults_of_generation_config() -> None:
    from dataclasses import replace

    defaults = {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.2}
    service = FakeService(limits=replace(FakeService().limits, defaults=defaults))
    post(COMPLETIONS, {"prompt": "a"}, service)
    post(COMPLETIONS, {"prompt": "a", "temperature": 1, "do_sample": False}, service)
    params = service.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, -1, 0.95, 1.2)
    assert service.requests[1].params.greedy


@pytest.mark.parametrize("stream", [False, True])
def test_e18_too_long(stream: bool) -> None:
    for count in (CONTEXT, CONTEXT + 1):
        found = problem(post(COMPLETIONS, {"prompt": [5] * count, "stream": stream}), 400)
        assert found["code"] == "context_length_exceeded"
        assert str(CONTEXT) in found["message"] and str(count) in found["message"]
    found = problem(post(CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}], "stream": stream}), 400)
    assert found["code"] == "context_length_exceeded"
    exact = post(COMPLETIONS, {"prompt": [5] * (CONTEXT - 1), "max_tokens": 100}).json()["usage"]
    assert exact == {
        "prompt_tokens": CONTEXT - 1,
        "completion_tokens": 1,
        "total_tokens": CONTEXT,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("prompt", ["x" * 70_000, "x" * 500])
def test_e18_long_texts(prompt: str) -> None:
    assert problem(post(COMPLETIONS, {"prompt": prompt}), 400)["code"] == "context_length_exceeded"


def test_e22_template_refuses_with_its_own_words() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    found = problem(post(CHAT, TALK | {"messages": messages}), 400)
    assert "system must come first" in found["message"] and found["param"] == "messages"


def test_e22_content_forms() -> None:
    service = FakeService()
    forms: list[Any] = ["ab", [{"type": "text", "text": "ab"}], [{"type": "input_text", "text": "ab"}]]
    for content in forms:
        post(CHAT, TALK | {"messages": [{"role": "user", "content": content}]}, service)
    prompts = [r.prompts for r in service.requests]
    assert prompts[0] == prompts[1] == prompts[2]
    history = [*HELLO, {"role": "assistant", "content": None}, *HELLO]
    assert post(CHAT, TALK | {"messages": history}).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "a"}],
        [{"role": "user"}],
        [{"content": "a"}],
        ["a"],
        "hi",
        None,
        {"role": "user", "content": "a"},
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}],
    ],
    ids=str,
)
def test_e22_bad_messages(messages: Any) -> None:
    found = problem(post(CHAT, TALK | {"messages": messages}), 400)
    assert (found["param"] or "").startswith("messages")


def test_e23_shapes() -> None:
    headers = {"content-type": "application/json"}
    problem(ask("POST", CHAT, content='{"messages": [', headers=headers), 400)
    problem(ask("POST", CHAT, headers=headers), 400)
    assert problem(post(CHAT, {"max_tokens": 2}), 400)["param"] == "messages"
    assert problem(post(COMPLETIONS, {"max_tokens": 2}), 400)["param"] == "prompt"
    for answer in both({"model": "nope"}) + both({"model": ""}):
        found = problem(answer, 404)
        assert found["code"] == "model_not_found" and found["param"] == "model"
    assert "nothing" in problem(ask("GET", "/v1/nothing"), 404)["message"]
    refused = ask("PUT", CHAT, json=TALK)
    problem(refused, 405)
    assert refused.headers["allow"] == "POST"
    assert all(a.status_code == 200 for a in both({"model": MODEL}) + both({"model": "alias"}))


def test_e24_extra_fields_change_nothing() -> None:
    extra = {
        "metadata": {"a": "b"},
        "user": "u",
        "store": False,
        "service_tier": "auto",
        "chat_id": "1",
        "stop": None,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "n": None,
        "stream_options": None,
        "logprobs": None,
        "parallel_tool_calls": True,
        "reasoning_effort": "minimal",
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "some_future_field": {"deep": [1]},
    }
    plain = both({})
    for with_extra, without in zip(both(extra), plain, strict=True):
        assert with_extra.status_code == 200, with_extra.text
        assert with_extra.json()["choices"] == without.json()["choices"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "echo", True),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "best_of", 3),
        (COMPLETIONS, "prompt_logprobs", 0),
        (COMPLETIONS, "response_format", {"type": "json_object"}),
        (COMPLETIONS, "guided_regex", "a+"),
        (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "response_format", "json"),
        (CHAT, "bad_words", ["x"]),
        (CHAT, "spaces_between_special_tokens", False),
        (COMPLETIONS, "add_spaces_between_special_tokens", False),
        (CHAT, "continue_final_message", True),
    ],
)
def test_what_is_not_done_is_refused_by_name(path: str, field: str, value: Any) -> None:
    body = (TEXT if path == COMPLETIONS else TALK) | {field: value}
    assert problem(post(path, body), 400)["param"] == field


def test_sequences_that_can_never_fit_are_refused() -> None:
    assert problem(post(COMPLETIONS, TEXT | {"prompt": ["a"] * 3, "n": 3}), 400)["param"] == "prompt"
    assert problem(post(COMPLETIONS, TEXT | {"prompt": ["a"] * 5000}), 400)["param"] == "prompt"


def test_overload_and_unavailability() -> None:
    busy = post(COMPLETIONS, TEXT, FakeService(submit_error=Overloaded("full", retry_after=3)))
    assert problem(busy, 429)["type"] == "rate_limit_error" and busy.headers["retry-after"] == "3"
    away = post(COMPLETIONS, TEXT | {"stream": True}, FakeService(submit_error=Unavailable("away")))
    assert problem(away, 503)["code"] == "service_unavailable" and int(away.headers["retry-after"]) > 0


def test_refusals_are_counted_by_reason() -> None:
    service = FakeService()
    post(COMPLETIONS, {}, service)
    post(CHAT, TALK | {"model": "nope"}, service)
    ask("POST", CHAT, service, content=b"{", headers={"content-type": "application/json"})
    service.submit_error = Overloaded("full")
    post(COMPLETIONS, TEXT, service)
    service.submit_error = Unavailable("away")
    post(COMPLETIONS, TEXT, service)
    service.submit_error = None
    post(COMPLETIONS, TEXT, service)
    service.fail_after, service.error = 0, RequestFailed("broke")
    assert post(COMPLETIONS, TEXT, service).status_code == 500  # it ran: not a refusal
    ask("GET", "/v1/nothing", service)
    assert service.refusals == ["invalid", "invalid", "invalid", "overloaded", "unavailable"]


def test_fuzzed_bodies_never_give_5xx() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
    value = junk | st.lists(junk, max_size=3) | st.dictionaries(st.text("aberol", max_size=4), junk, max_size=3)
    fields = st.sampled_from([*RANGES, "prompt", "messages", "stop", "logit_bias", "logprobs", "top_logprobs", "tools"])

    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(fields, value, max_size=4), st.sampled_from([COMPLETIONS, CHAT]))
    def check(extra: dict[str, Any], path: str) -> None:
        import json

        body = (TEXT if path == COMPLETIONS else TALK) | extra
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        answer = ask("POST", path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), answer.text

    check()
