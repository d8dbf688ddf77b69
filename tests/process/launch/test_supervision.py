"""The real launcher over scripted children: start, deaths, restarts, drain, stop, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.model_folder import write_model
from tests.pace import slowness
from tests.process.launch.running import ROLES, Launched


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that resolves."""
    return write_model(tmp_path / "tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where one launch keeps its files; short, because unix socket paths are."""
    return tmp_path / "l"


def _gone(pids: list[int], seconds: float) -> bool:
    """True when none of `pids` runs any more; one that only waits for init to collect it does not run."""
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_start_and_hear_that_the_service_is_ready(folder: Path, model: Path) -> None:
    with Launched(folder, model, "--httpserver-workers", "2", engine_0={"ready_after": 0.3}) as launched:
        launched.serving()
        assert set(launched.pids()) == {*ROLES, "http-1"}
        launched.until(lambda: all("ServiceReady" in launched.saw(name) for name in launched.pids()))
        assert launched.status()["state"] == "serving"


@pytest.mark.parametrize("role", ["http-0", "metrics"])
def test_a_dead_http_or_metrics_process_is_restarted_in_place(folder: Path, model: Path, role: str) -> None:
    with Launched(folder, model) as launched:
        launched.serving()
        launched.until(lambda: "ServiceReady" in launched.saw(role))
        before = launched.pids()
        os.kill(before[role], signal.SIGKILL)
        launched.until(lambda: launched.pids().get(role, before[role]) != before[role])
        launched.until(lambda: launched.saw(role).count("ServiceReady") == 2)
        assert launched.saw(role)[2].startswith("start 2 ")
        assert {n: p for n, p in launched.pids().items() if n != role} == {n: p for n, p in before.items() if n != role}
        lost = ["lost 0 1280"] if role == "http-0" else []
        launched.until(lambda: [line for line in launched.saw("router") if line.startswith("lost")] == lost)


def test_the_lost_range_is_the_worker_s(folder: Path, model: Path) -> None:
    flags = ("--httpserver-workers", "2", "--running-max-req-size", "8", "--max-queued-requests", "2")
    with Launched(folder, model, *flags) as launched:
        launched.serving()
        os.kill(launched.pids()["http-1"], signal.SIGKILL)
        launched.until(lambda: "lost 10 20" in launched.saw("router"))


def test_three_deaths_within_a_minute_end_the_service(folder: Path, model: Path) -> None:
    with Launched(folder, model, http_0={"die_after": 0.05}) as launched:
        assert launched.end() == 70
        assert "http-0 died 3 times within 60 s" in launched.last_line()
        assert not launched.status()


@pytest.mark.parametrize("role", ["router", "engine-0", "detokenize"])
def test_a_dead_core_process_ends_the_service(folder: Path, model: Path, role: str) -> None:
    with Launched(folder, model) as launched:
        launched.serving()
        pids = list(launched.pids().values())
        os.kill(launched.pids()[role], signal.SIGSEGV)
        began = time.monotonic()
        assert launched.end() == 70
        assert time.monotonic() - began < 2.0 * slowness()
        assert f"{role} died: killed by SIGSEGV" in launched.last_line()
        assert _gone(pids, 0)
        assert "stop" in launched.saw("http-0")


@pytest.mark.parametrize(("kind", "status"), [("fault", 70), ("config_fault", 2)])
def test_a_fault_during_start_ends_it_at_once(folder: Path, model: Path, kind: str, status: int) -> None:
    scripts = {"engine_0": {kind: "no such tensor"}, "router": {"ready_after": 1.0}}
    with Launched(folder, model, **scripts) as launched:
        assert launched.end(4) == status
        assert "engine-0: " in launched.last_line() and "no such tensor" in launched.last_line()


def test_an_exit_during_start_ends_it_at_once(folder: Path, model: Path) -> None:
    with Launched(folder, model, metrics={"exit_at_start": 3}) as launched:
        assert launched.end() == 70
        assert "metrics died: exit status 3" in launched.last_line()


def test_sigterm_drains_then_stops(folder: Path, model: Path) -> None:
    with Launched(folder, model, http_0={"drain_takes": 0.7}) as launched:
        launched.serving()
        launched.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert launched.end() == 0
        assert 0.6 < time.monotonic() - began < 2.5 * slowness()
        assert launched.saw("http-0")[-2:] == ["Drain", "stop"]
        assert "Drain" not in launched.saw("router")
        assert list(launched.runs.iterdir()) == []


def test_the_drain_has_a_deadline(folder: Path, model: Path) -> None:
    with Launched(folder, model, "--drain-timeout", "0.5", http_0={"drain_takes": 60}) as launched:
        launched.serving()
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end(4) == 0
        assert launched.logged("drain deadline passed")


@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]]
)
def test_sigint_or_a_second_signal_stops_now(folder: Path, model: Path, numbers: list[int]) -> None:
    scripts = {"http_0": {"drain_takes": 60}, "engine_0": {"ignores_stop": True, "grandchild": True}}
    with Launched(folder, model, **scripts) as launched:
        launched.serving()
        pids = list(launched.pids().values())
        pids.append(int(launched.saw("engine-0")[1].split()[1]))
        for number, answer in zip(numbers, ["draining", "stopping"][-len(numbers) :], strict=True):
            launched.process.send_signal(number)
            # Two at once may reach a process as one.
            launched.until(lambda: launched.logged(f"{answer} signal={signal.Signals(number).name}"))  # noqa: B023
        began = time.monotonic()
        assert launched.end() == 0
        assert time.monotonic() - began < 2.5 * slowness()
        assert _gone(pids, 0.5)


def test_signals_do_not_end_children_that_still_import(folder: Path, model: Path) -> None:
    """As Ctrl-C does with the foreground process, and an init system that signals a whole control group."""
    with Launched(folder, model) as launched:
        for role in ROLES:
            pid = launched.until(lambda: launched.pids().get(role))  # noqa: B023
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        launched.serving()
        assert all(len(launched.saw(role)) >= 1 for role in ROLES)


def test_sighup_is_ignored(folder: Path, model: Path) -> None:
    with Launched(folder, model) as launched:
        launched.serving()
        launched.process.send_signal(signal.SIGHUP)
        for pid in launched.pids().values():
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.3)
        assert launched.process.poll() is None and launched.status()["state"] == "serving"
        assert all(psutil.pid_exists(pid) for pid in launched.pids().values())


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_during_start(folder: Path, model: Path, delay: float, number: int) -> None:
    with Launched(folder, model, engine_0={"ready_after": 30}) as launched:
        time.sleep(delay)
        launched.process.send_signal(number)
        began = time.monotonic()
        status = launched.end()
        assert time.monotonic() - began < 2.5 * slowness()
        # Before main runs, the signal finds Python's own handling and nothing to stop.
        assert status == 0 or (status < 0 and not launched.lines) or "KeyboardInterrupt" in launched.last_line()


@pytest.mark.parametrize("serving", [True, False])
def test_kill_of_the_launcher_leaves_nothing(folder: Path, model: Path, serving: bool) -> None:
    shm = set(Path("/dev/shm").iterdir())
    with Launched(folder, model, engine_0={"ready_after": 0 if serving else 30}) as launched:
        port = launched.until(lambda: launched.status().get("url", "").rpartition(":")[2])
        pids = launched.until(lambda: list(launched.pids().values()))
        if serving:
            launched.serving()
        launched.process.kill()
        assert _gone(pids, 2.0 * slowness())
        left = [path.name for path in launched.runs.iterdir()]
        assert len(left) == 1
    assert set(Path("/dev/shm").iterdir()) <= shm
    with Launched(folder / "2", model, "--port", port, runs=launched.runs) as again:
        assert again.serving().endswith(port)
        assert left[0] not in {path.name for path in again.runs.iterdir()}


def test_the_next_boot_removes_what_a_dead_one_left_and_spares_the_living(folder: Path, model: Path) -> None:
    with Launched(folder, model) as first:
        first.serving()
        alive = {p.name for p in first.runs.iterdir()}
        dead = first.runs / "boot-dead"
        dead.mkdir()
        (dead / "lock").write_text("{}")
        (dead / "router.sock").touch()
        with Launched(folder / "2", model, runs=first.runs) as second:
            second.serving()
            assert not dead.exists()
            assert alive < {p.name for p in first.runs.iterdir()}
            second.process.send_signal(signal.SIGTERM)
            assert second.end() == 0
        assert {p.name for p in first.runs.iterdir()} == alive
        assert first.status()["state"] == "serving"


def test_the_foreground_role_keeps_the_terminal(folder: Path, model: Path) -> None:
    with Launched(folder, model, "--foreground", "router") as launched:
        launched.serving()
        pids = launched.pids()
        ours = os.getpgid(launched.process.pid)
        assert {name for name, pid in pids.items() if os.getpgid(pid) == ours} == {"router"}
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == 0
        assert _gone(list(pids.values()), 0)
