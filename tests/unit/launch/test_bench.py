"""`inferserve bench`: lists and runs the repository's benchmarks, and says where they are when they are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inferserve.config.machine import cuda_problem
from inferserve.errors import ConfigError
from inferserve.launch import cli
from inferserve.launch.bench import bench

ROOT = Path(__file__).parents[3]


def test_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    for name in ("floors", "offline", "serve_load", "startup", "gpu_suite", "kernels_gpu"):
        assert f"\n  {name} " in shown
    assert "load_worker" not in shown and "raw_app" not in shown


def test_runs_one_from_anywhere(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from inferserve.launch.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "bench", "serve-load", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--workload" in done.stdout


def test_an_unknown_name_and_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "nothing"]) == 2
    assert "serve_load" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="clone the repository"):
        bench(["floors"], (tmp_path,))


@pytest.mark.skipif(not cuda_problem(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["floors", "kernels_gpu", "all_reduce"])
def test_without_the_gpu_it_needs(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {name} needs a GPU: ")
