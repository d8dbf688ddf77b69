"""Run directories: private, locked, cleaned only when dead."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inferserve.config import env
from inferserve.config.machine import process_age
from inferserve.errors import ConfigError
from inferserve.launch.run_dir import RunDir


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories of boots are made."""
    monkeypatch.setenv(env.RUN_DIR, str(tmp_path / "base"))
    return tmp_path / "base"


def test_it_is_private_and_gone_after_close(base: Path) -> None:
    run_dir = RunDir.create()
    assert run_dir.path.parent == base
    assert base.stat().st_mode & 0o777 == run_dir.path.stat().st_mode & 0o777 == 0o700
    assert json.loads((run_dir.path / "lock").read_text())["pid"] == os.getpid()
    run_dir.write_status(state="x")
    assert json.loads((run_dir.path / "status.json").read_text()) == {"state": "x"}
    run_dir.close()
    assert list(base.iterdir()) == []


def test_an_open_base_is_closed(base: Path) -> None:
    base.mkdir(mode=0o755)
    RunDir.create().close()
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="INFERSERVE_RUN_DIR"):
        RunDir.create()


def test_a_file_in_its_place_is_an_error(base: Path) -> None:
    base.write_text("")
    with pytest.raises(ConfigError, match="run directory"):
        RunDir.create()


def test_only_the_dead_are_removed(base: Path) -> None:
    alive = RunDir.create()
    dead, starting, foreign = base / "boot-dead", base / ".new-starting", base / "notes"
    for folder in (dead, starting, foreign):
        folder.mkdir()
    (dead / "lock").touch()
    old = base / ".new-old"
    old.mkdir()
    os.utime(old, (1, 1))
    other = RunDir.create()
    assert {p.name for p in base.iterdir()} == {alive.path.name, other.path.name, ".new-starting", "notes"}
    alive.close()
    other.close()


def test_a_process_knows_its_age() -> None:
    assert 0 < process_age() < 100_000
