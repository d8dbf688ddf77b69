"""Benchmarks for GPUs run here too, on small shapes or the fake engine: what they print and write, and what fails."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_suite, logits, serve_load, startup
from benchmarks.gpu_stages import COMMON, DEFAULT, MODELS, STAGES, Model
from benchmarks.load_events import Outcome
from benchmarks.long_context import gaps_within, prefill_flops
from inferserve.config import cli
from inferserve.config.model_config import ModelConfig
from tests.fakes.model_folder import CONFIG

_FAKE = "--engine fake --fake-step-ms 1"


def _run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_floors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "floors.json"
    flags = ("--device", "cpu", "--copy-mb", "1", "--matmul", "64", "--rows", "1", "8", "--out", str(out))
    done = _run("floors", "--shape", str(tmp_path), *flags)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert set(figures["decode_gemms_ms"]) == {"1", "8"} and figures["copy_tb_s"] > 0
    assert figures["kv_bytes_per_token_bf16"] == 2 * 2 * 2 * 4 * 2


def test_phases_of_a_start() -> None:
    log = (
        "23:40:01.1 INFO    engine-0     weights loaded seconds=1.25 runs_on=Decoder\n"
        "23:40:02.1 INFO    engine-0     warmed up seconds=3\nnoise\n"
        "23:40:03.1 INFO    http-0       ready seconds=4.199\n"
    )
    assert startup.phases(log) == {"engine-0 weights loaded": 1.25, "engine-0 warmed up": 3.0, "http-0 ready": 4.199}


def test_operations_of_a_prompt() -> None:
    config = ModelConfig.from_json(CONFIG)
    layer = 2 * (16 * 4 * 12 + 3 * 16 * 32)
    attention = 2 * 4 * 4 * 4 * 100**2 / 2
    assert prefill_flops(config, 100) == pytest.approx(2 * layer * 100 + attention * 1.0, rel=0.05)


def test_gaps_in_a_window() -> None:
    ms = 10**6
    seen = Outcome(0, 0, 0, 1, 0, 0, "", True, [t * ms for t in (0, 10, 30, 60, 100)])
    assert gaps_within([seen], 25 * ms, 60 * ms) == [20, 30]


@pytest.mark.slow
def test_suite_goes_on_after_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is killed, one that fails, a model whose server does not start, no time left: all are named."""
    load = "--clients 2 --requests 4 --input-len 16 --output-len 8"
    monkeypatch.setitem(MODELS, "0.6b", Model("qwen3-0.6b", "--max-n 0"))
    stages = [
        gpu_suite.Stage("slow", "8b", "benchmarks.serve_load", "--clients 1 --requests 1 --output-len 8000", 2.0),
        gpu_suite.Stage("bad", "8b", "benchmarks.serve_load", f"{load} --model nobody", 20.0),
        gpu_suite.Stage("good", "8b", "benchmarks.serve_load", load, 20.0, 100.0),
        gpu_suite.Stage("unserved", "0.6b", "benchmarks.serve_load", load, 20.0),
        gpu_suite.Stage("late", "", "benchmarks.floors", "", 20.0),
    ]
    suite = gpu_suite.Suite(tmp_path, 60.0, _FAKE)
    suite.run(stages[:4])
    suite._end = 0.0
    suite.run(stages[4:])
    status = {row["name"]: row["status"] for row in suite.rows}
    assert status["8b-start"] == status["good"] == "ok"
    assert status["slow"].startswith("KILLED") and status["bad"] == "FAILED (1)"
    assert status["0.6b-start"] == "FAILED" and status["unserved"] == "skipped: no server"
    assert status["late"] == "skipped: no time left"
    lines = gpu_suite.table(suite.rows)
    assert any("--max-n 0" in line for line in lines), lines
    assert any("nobody" in line for line in lines), lines
    saved = json.loads((tmp_path / "summary.json").read_text())["figures"]["stages"]
    assert [row["name"] for row in saved] == [row["name"] for row in suite.rows]
    assert saved[3]["figures"]["tokens"]["by_usage"] == 32 and saved[3]["server_cpu_us_per_token"]


@pytest.mark.slow
def test_suite_tries_a_start_once_more(tmp_path: Path) -> None:
    load = "--clients 2 --requests 2 --input-len 16 --output-len 8"
    stages = [gpu_suite.Stage("load", "8b", "benchmarks.serve_load", load, 20.0)]
    suite = gpu_suite.Suite(tmp_path, 90.0, "--engine fake --max-n 0", "--max-n 4")
    suite.run(stages)
    assert [(row["name"], row["status"]) for row in suite.rows] == [
        ("8b-start", "FAILED"),
        ("8b-start", "ok"),
        ("load", "ok"),
    ]
    assert suite.rows[1]["flags"].endswith("--max-n 4")


def test_every_stage_has_a_server_and_flags_that_exist() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names) and set(DEFAULT.split(",")) <= set(names)
    shapes = {p.name for p in (Path(gpu_suite.__file__).parent / "shapes").iterdir()}
    for stage in STAGES:
        assert not stage.model or MODELS[stage.model].shape in shapes
        if stage.module == "benchmarks.serve_load":
            serve_load.plan_of(serve_load.parser().parse_args(shlex.split(stage.args)), "m")
    for model in MODELS.values():
        cli.parse(shlex.split(f"{COMMON} {model.flags}"))


@pytest.mark.slow
def test_logits_are_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64, "intermediate_size": 128}))
    out = tmp_path / "logits.json"
    flags = ("--rows", "6", "--tail", "8", "--length", "40", "--out", str(out))
    done = _run("logits", "--shape", str(tmp_path), "--flags=--device cpu --data-type bfloat16", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert list(figures["ways"]) == ["eager, chunk", "eager, alone", "eager, among 5", "eager, beside a chunk"]
    assert all(way["over_transformers"] <= 1.15 for way in figures["ways"].values())
    assert 0 < figures["transformers_error"] < 0.05


def test_logits_that_are_wrong_are_named() -> None:
    exact = torch.randn(6, 50)
    rounded = exact + 0.001 * torch.randn(6, 50)
    wrong = exact.roll(1, -1)
    figures = logits.compare(exact, rounded, {"good": exact + 0.0005, "bad": wrong})
    said = logits.problems(figures, 1.15, deterministic=True)
    assert any(line.startswith("bad: error") for line in said)
    assert any("clear choices differ" in line for line in said) and "bad: not equal to the bit" in said
    assert not any(line.startswith("good") for line in said)
    assert logits.problems(logits.compare(exact, rounded, {"nan": exact * torch.nan}), 1.15, deterministic=False)


@pytest.mark.slow
def test_soak_counts_what_was_delivered(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    flags = ("--minutes", "0.1", "--clients", "4", "--longest", "40", "--drift", "3", "--out", str(out))
    done = _run("soak", f"--flags={_FAKE}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert figures["problems"] == []
    assert figures["tokens"]["counted"] == figures["tokens"]["delivered"] > 0
    assert {"engine-0", "http-0", "router"} <= set(figures["memory"])
