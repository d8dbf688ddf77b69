"""LightLLM's native routes: its exact shapes, with right status codes (fake service)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http_service import CONTEXT, VOCAB, WORDS, FakeService, ask, events, post, problem, text_of, words

BODY: dict[str, Any] = {"inputs": "hi", "parameters": {"max_new_tokens": 4, "seed": 3, "do_sample": True}}


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": BODY["parameters"] | parameters}


def test_generate() -> None:
    assert post("/generate", BODY).json() == {
        "generated_text": [text_of(3, 4)],
        "count_output_tokens": 4,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "input_usage": {"input_text_tokens": 3, "input_audio_tokens": 0, "input_image_tokens": 0},
    }


def test_generate_several_and_details() -> None:
    answer = post("/generate", body(n=2, best_of=2, return_details=True)).json()
    assert len(answer["generated_text"]) == 2 and answer["count_output_tokens"] == [4, 4]
    assert answer["finish_reason"] == ["length", "length"]
    tokens = answer["tokens"][0]
    assert [t["text"] for t in tokens] == [WORDS[w] for w in words(3, 4)]
    assert tokens[2] == {
        "id": 1000 + words(3, 3)[-1],
        "text": WORDS[words(3, 3)[-1]],
        "logprob": -0.5,
        "special": False,
        "count_output_tokens": 3,
        "prompt_tokens": 3,
    }
    assert isinstance(post("/generate", body(return_details=True)).json()["tokens"][0], dict)


def test_stream() -> None:
    frames = events(post("/generate_stream", BODY), "data:")
    assert "".join(f["token"]["text"] for f in frames) == text_of(3, 4)
    assert [f["finished"] for f in frames] == [False, False, False, True]
    assert [f["finish_reason"] for f in frames] == [None, None, None, "length"]
    assert [f["token"]["count_output_tokens"] for f in frames] == [1, 2, 3, 4]
    assert set(frames[0]) == {"token", "generated_text", "finished", "finish_reason", "details", "input_usage"}
    assert set(frames[0]["token"]) == {"id", "text", "logprob", "special", "count_output_tokens", "prompt_tokens"}
    assert frames[0]["generated_text"] is None and frames[0]["details"] is None


def test_stream_failures() -> None:
    assert problem(post("/generate_stream", BODY, FakeService(fail_after=0)), 500)
    *_, last = events(post("/generate_stream", BODY, FakeService(fail_after=2)), "data:")
    assert last["error"]["message"] == "the row broke"
    assert problem(post("/generate_stream", body(n=2)), 400)["param"] == "n"


def test_params() -> None:
    service = FakeService()
    post("/generate", {"inputs": [5, 6], "parameters": {}}, service)
    post(
        "/generate",
        body(temperature=0.5, top_p=0.9, top_k=4, presence_penalty=1, min_new_tokens=2, ignore_eos=True,
             stop_sequences=["a", [7], [3 + 104, 3 + 105]], skip_special_tokens=False),
        service,
    )  # fmt: skip
    first, second = (r.params for r in service.requests)
    assert first.greedy and (first.max_tokens, first.min_tokens) == (16, 1) and service.requests[0].prompts == ([5, 6],)
    assert (second.temperature, second.top_p, second.top_k, second.presence_penalty) == (0.5, 0.9, 4, 1)
    assert second.stop == ("a", "hi") and second.stop_token_ids == (7,)
    assert second.ignore_eos and second.min_tokens == 2 and not second.skip_special_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"best_of": 2, "n": 1}, "best_of"),
        ({"n": 5}, "n"),
        ({"temperature": -1}, "parameters.temperature"),
        ({"max_new_tokens": 0}, "parameters.max_new_tokens"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
        ({"stop_sequences": [[VOCAB]]}, "stop_sequences"),
        ({"stop_sequences": [[True]]}, "parameters.stop_sequences"),
        ({"guided_json": "{}"}, "guided_json"),
        ({"regular_constraint": "a"}, "regular_constraint"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"exponential_decay_length_penalty": [1, 1.5]}, "exponential_decay_length_penalty"),
    ],
    ids=str,
)
def test_bad_parameters(change: dict[str, Any], param: str) -> None:
    assert problem(post("/generate", body(**change)), 400)["param"] == param


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"inputs": "hi"}, "parameters"),
        ({"parameters": {}}, "inputs"),
        ({"inputs": "", "parameters": {"add_special_tokens": False}}, "inputs"),
        ({"inputs": [], "parameters": {}}, "inputs"),
        ({"inputs": [-1], "parameters": {}}, "inputs"),
        ({"inputs": [True], "parameters": {}}, "inputs"),
        ({"inputs": [5] * CONTEXT, "parameters": {}}, "inputs"),
        ({"inputs": "a", "parameters": {}, "multimodal_params": {"images": [{"type": "url"}]}}, "multimodal_params"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_bodies(raw: dict[str, Any], param: str) -> None:
    for path in ("/generate", "/generate_stream"):
        assert problem(post(path, raw), 400)["param"] == param


def test_unknown_parameters_and_empty_media_are_ignored() -> None:
    raw = body(
        image_max_patch_num=-1, disable_prompt_cache=True, whatever=1, regular_constraint=None, input_penalty=None
    )
    answer = post("/generate", raw | {"multimodal_params": {"images": [], "audios": []}})
    assert answer.json() == post("/generate", BODY).json()


def test_tokens() -> None:
    for method in ("GET", "POST"):
        assert ask(method, "/tokens", json={"text": "héllo", "parameters": {"top_k": 5}}).json() == {"ntokens": 7}
    assert post("/tokens", {"text": "a", "parameters": {"add_special_tokens": False}}).json() == {"ntokens": 1}
    assert problem(post("/tokens", {}), 400)["param"] == "text"
    assert problem(post("/tokens", {"text": 1}), 400)["param"] == "text"
