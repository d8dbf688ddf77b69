"""Contradictions and ranges: every rule says which flags it is about."""

from __future__ import annotations

import pytest

from inferserve.config.checks import check_settings
from inferserve.config.cli import parse


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--port 70000", ["--port"]),
        ("--port -1", ["--port"]),
        ("--httpserver-workers 0", ["--httpserver-workers"]),
        ("--mem-fraction 0", ["--mem-fraction"]),
        ("--mem-fraction 1", ["--mem-fraction"]),
        ("--mem-fraction nan", ["--mem-fraction"]),
        ("--router-token-ratio 1.1", ["--router-token-ratio"]),
        ("--router-token-ratio -0.1", ["--router-token-ratio"]),
        ("--running-max-req-size 0", ["--running-max-req-size"]),
        ("--max-queued-requests -5", ["--max-queued-requests"]),
        ("--drain-timeout -1", ["--drain-timeout"]),
        ("--drain-timeout inf", ["--drain-timeout"]),
        ("--max-n 0", ["--max-n"]),
        ("--max-n 65", ["--max-n"]),
        ("--pipeline-depth 2", ["--pipeline-depth"]),
        ("--cpu-threads -1", ["--cpu-threads"]),
        ("--max-body-bytes 5", ["--max-body-bytes"]),
        ("--log-stats-interval 0", ["--log-stats-interval"]),
        ("--eos-id -3", ["--eos-id"]),
        ("--tp 0", ["--tp"]),
        ("--tp 65", ["--tp"]),
        ("--max-req-total-len 1", ["--max-req-total-len"]),
        ("--served-model-name ,", ["--served-model-name"]),
        ("--host=", ["--host"]),
        ("--engine fake --device cuda", ["--engine", "--device"]),
        ("--fake-step-ms 3", ["--fake-step-ms", "--engine"]),
        ("--fake-kv-tokens 3", ["--fake-kv-tokens", "--engine"]),
        ("--fake-period 3", ["--fake-period", "--engine"]),
        ("--spec-mode ngram --spec-tokens 17", ["--spec-tokens"]),
        ("--spec-tokens 3", ["--spec-tokens", "--spec-mode"]),
        ("--target-step-ms -1", ["--target-step-ms"]),
        ("--target-step-ratio 0.5", ["--target-step-ratio"]),
        ("--target-step-ratio -0.5", ["--target-step-ratio"]),
        ("--target-step-ms 9 --target-step-ratio 2", ["--target-step-ms", "--target-step-ratio"]),
        ("--device cpu --attention-backend triton", ["--device", "--attention-backend"]),
        ("--max-total-token-num 100 --max-req-total-len 200", ["--max-total-token-num", "--max-req-total-len"]),
        (
            "--engine fake --fake-kv-tokens 100 --max-req-total-len 200",
            ["--fake-kv-tokens 100", "--max-req-total-len 200"],
        ),
        ("--batch-max-tokens 100 --chunked-prefill-size 200", ["--batch-max-tokens", "--chunked-prefill-size"]),
        ("--disable-chunked-prefill --chunked-prefill-size 9", ["--disable-chunked-prefill", "--chunked-prefill-size"]),
        (
            "--disable-chunked-prefill --batch-max-tokens 100 --max-req-total-len 200",
            ["--disable-chunked-prefill", "--batch-max-tokens", "--max-req-total-len"],
        ),
    ],
)
def test_one_line_names_the_flags(argv: str, flags: list[str]) -> None:
    (problem,) = check_settings(parse(argv.split()).settings)
    assert all(flag in problem for flag in flags)


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--router-token-ratio 0",
        "--router-token-ratio 1",
        "--max-queued-requests 0",
        "--drain-timeout 0",
        "--port 0",
        "--engine fake --fake-step-ms 2.5 --fake-kv-tokens 1000",
        "--spec-mode ngram --spec-tokens 16 --target-step-ms 12 --target-step-ratio 0",
        "--batch-max-tokens 200 --chunked-prefill-size 200",
        "--max-total-token-num 200 --max-req-total-len 200",
    ],
)
def test_the_edges_are_allowed(argv: str) -> None:
    assert check_settings(parse(argv.split()).settings) == []


def test_every_problem_is_listed() -> None:
    assert len(check_settings(parse(["--port", "-1", "--max-n", "0", "--mem-fraction", "3"]).settings)) == 3
