"""The line of a finished request: LightLLM's fields, one line whatever clients send."""

from __future__ import annotations

import json
import logging

import pytest

from inferserve.errors import RequestFailed
from inferserve.http.generation import GenerateRequest, Generation
from inferserve.http.request_log import RequestLog
from inferserve.log import JsonFormatter, KeyValueFormatter
from inferserve.protocol.sampling import SamplingParams

MS = 10**6


def generation() -> Generation:
    request = GenerateRequest(
        prompts=([1, 2, 3, 4],), params=SamplingParams(), request_id="r1", session_id="s1", name="cmpl-1", arrival_ns=0
    )
    made = Generation(request, lambda _: None)
    made.usage.completion_tokens, made.usage.cached_tokens = 11, 3
    return made


def written(caplog: pytest.LogCaptureFixture, made: Generation, enabled: bool = True) -> logging.LogRecord | None:
    with caplog.at_level(logging.INFO, "inferserve"):
        RequestLog(enabled).finished(made, "stop", 20 * MS, 120 * MS)
    return caplog.records[-1] if caplog.records else None


def test_fields(caplog: pytest.LogCaptureFixture) -> None:
    record = written(caplog, generation())
    assert record is not None
    line = KeyValueFormatter("http-0").format(record)
    for part in (
        "request finished X-Request-Id=r1 X-Session-Id=s1 start_time=2",
        "req_id=cmpl-1 first_token_cost=20.0ms total_cost_time=120.0ms out_token_counter=11",
        "mean_per_token_cost_time=10.00ms prompt_token_num=4",
        "gpu_cache_hit=True gpu_prompt_cache_len=3 gpu_prompt_cache_ratio=0.75 finish_reason=stop",
    ):
        assert part in line
    body = json.loads(JsonFormatter("http-0").format(record))
    assert body["out_token_counter"] == 11 and body["X-Request-Id"] == "r1"


def test_an_error_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made = generation()
    made.fail(RequestFailed('bad\n"line"\x1b[31m'))
    record = written(caplog, made)
    assert record is not None
    line = KeyValueFormatter("http-0").format(record)
    assert "\n" not in line and "\x1b" not in line and "error=" in line


def test_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    assert written(caplog, generation(), enabled=False) is None
