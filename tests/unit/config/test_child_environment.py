"""What children find in their environment."""

from __future__ import annotations

import pytest

from inferserve.config import env


def test_threads_sleep_at_barriers_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert env.child_environment(one_thread=False)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert env.child_environment(one_thread=False)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_processes_without_linear_algebra_get_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert env.child_environment(one_thread=True)["OMP_NUM_THREADS"] == "1"
    assert env.child_environment(one_thread=False)["OMP_NUM_THREADS"] == "4"


def test_our_own_settings_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE, "/somewhere")
    assert env.CACHE not in env.child_environment(one_thread=False)
