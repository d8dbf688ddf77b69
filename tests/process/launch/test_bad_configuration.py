"""`inferserve serve` with a configuration that cannot work: exit 2, one line that names it, before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.model_folder import embedding, safetensors, write_model
from tests.pace import slowness

LIMIT_S = 2.0


def _serve(tmp_path: Path, *argv: str, command: str = "serve") -> list[str]:
    """Lines on stderr of a start that must end with status 2 within the limit."""
    limit = LIMIT_S * slowness()
    began = time.monotonic()
    env = {**os.environ, "INFERSERVE_RUN_DIR": str(tmp_path / "run"), "INFERSERVE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "inferserve", command, *argv], capture_output=True, text=True, env=env, timeout=60
    )
    took = time.monotonic() - began
    assert done.returncode == 2, done.stderr
    assert took <= limit, f"{took:.2f} s"
    assert done.stdout == ""
    assert not list((tmp_path / "run").glob("*"))
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--modl-dir", "x"], "--modl-dir; did you mean --model-dir?"),
        (["--mem-fraction", "1.5"], "--mem-fraction"),
        (["--device", "cuda", "--engine", "fake"], "--engine fake contradicts --device cuda"),
        (["--max-total-token-num", "10", "--max-req-total-len", "20"], "--max-total-token-num 10"),
        (["--model-dir", "/no/such/folder"], "/no/such/folder"),
        (["--host", "198.51.100.7"], "--host 198.51.100.7: not an address of this machine"),
        (["--port", "-1"], "--port -1"),
    ],
)
def test_one_line_names_the_flag(tmp_path: Path, argv: list[str], names: str) -> None:
    (line,) = _serve(tmp_path, "--port", "0", *argv)
    assert line.startswith("error: ") and names in line


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = _serve(tmp_path, "--port", str(port))
        assert line == f"error: --port {port}: already in use on 127.0.0.1"


def test_several_problems_are_one_line_each(tmp_path: Path) -> None:
    lines = _serve(tmp_path, "--port", "0", "--max-n", "0", "--mem-fraction", "2", "--model-dir", "/none")
    assert [line.split()[1] for line in lines] == ["--mem-fraction", "--max-n", "--model-dir"]


def test_an_unknown_command(tmp_path: Path) -> None:
    (line,) = _serve(tmp_path, command="serv")
    assert "'serv'" in line


def _corrupt_shard(model: Path) -> None:
    (model / "model.safetensors").write_bytes(safetensors(embedding())[:-1])


def _other_tokenizer(model: Path) -> None:
    write_model(model, tokens=80)


def _too_large(model: Path) -> None:
    """A sparse file of 4 TB: the header is consistent, the weights fit nowhere."""
    rows = 2**37
    header = safetensors({"w": ("BF16", [rows, 16], 0)}).replace(b"[0, 0]", f"[0, {rows * 32}]".encode())
    body = header[8:]
    with (model / "model-00002.safetensors").open("wb") as sink:
        sink.write(len(body).to_bytes(8, "little") + body)
        sink.truncate(8 + len(body) + rows * 32)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (_corrupt_shard, "model.safetensors: truncated"),
        (_other_tokenizer, "80 token ids, the model's embeddings only 64"),
        (_too_large, "too little host memory: "),
    ],
)
def test_a_model_that_cannot_be_served(tmp_path: Path, damage: Callable[[Path], None], names: str) -> None:
    model = write_model(tmp_path / "model")
    damage(model)
    (line,) = _serve(tmp_path, "--port", "0", "--model-dir", str(model), "--device", "cpu")
    assert names in line and line.startswith("error: ")


def test_too_many_slots_for_the_memory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=10_000_000)
    flags = ["--max-req-total-len", "10000000", "--max-queued-requests", "1000000", "--engine", "fake"]
    flags += ["--fake-kv-tokens", "10000000"]
    (line,) = _serve(tmp_path, "--port", "0", "--model-dir", str(model), *flags)
    assert "needed" in line and "available" in line and "--max-queued-requests" in line


def test_too_little_address_space(tmp_path: Path) -> None:
    """14 GB of request table, of which one worker's 0.2 GB are ever used, under `ulimit -v` of 8 GB."""
    model = write_model(tmp_path / "model")
    flags = ["--running-max-req-size", "2000", "--httpserver-workers", "64", "--engine", "fake"]
    command = ["prlimit", f"--as={8 * 2**30}", sys.executable, "-m", "inferserve", "serve", "--port", "0"]
    env = {**os.environ, "INFERSERVE_RUN_DIR": str(tmp_path / "run"), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--model-dir", str(model), *flags], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "request table" in done.stderr.splitlines()[-1] and "--httpserver-workers" in done.stderr.splitlines()[-1]


def test_check_says_the_same(tmp_path: Path) -> None:
    (line,) = _serve(tmp_path, "--max-n", "0", command="check")
    assert line == "error: --max-n 0: must be in [1, 64]"


def test_check_prints_the_configuration(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    command = [
        sys.executable,
        "-m",
        "inferserve",
        "check",
        "--model-dir",
        str(model),
        "--max_n",
        "3",
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["*", "max-n", "3"] in lines and ["*", "served-model-name", "tiny"] in lines
    assert ["architecture", "LlamaForCausalLM"] in lines


def test_env_names_versions_and_hides_secrets() -> None:
    env = {**os.environ, "HF_TOKEN": "hf_secret", "HF_HOME": "/x"}
    done = subprocess.run(
        [sys.executable, "-m", "inferserve", "env"], capture_output=True, text=True, check=True, env=env
    )
    assert "package torch: " in done.stdout and "memory: " in done.stdout and "env HF_HOME: /x" in done.stdout
    assert "hf_secret" not in done.stdout and "env HF_TOKEN: (hidden)" in done.stdout


def test_no_torch_before_the_processes_start() -> None:
    code = (
        "import sys; import inferserve.launch.serve; print([m for m in sys.modules if m in ('torch', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
