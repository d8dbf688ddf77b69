"""`RunningServer`: `inferserve serve` as a user starts it, with its output captured and its processes by role."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType

import httpx
import psutil

from tests.pace import slowness

_LOAD = ("inferserve_num_requests_running", "inferserve_num_requests_waiting", "inferserve_kv_cache_usage_perc")
READY = re.compile(r"http://([\d.]+):(\d+)")


class RunningServer:
    """Start with `with RunningServer("--engine", "fake") as server:`; `server.url` answers when the block begins."""

    def __init__(self, *flags: str, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> None:
        self.flags = flags
        self.timeout_s = timeout_s
        self.env = env or {}
        self.lines: list[str] = []
        self.url = ""
        self.start_seconds = 0.0
        self._ready = threading.Event()

    def __enter__(self) -> RunningServer:
        command = [sys.executable, "-m", "inferserve", "serve", "--port", "0", *self.flags]
        begin = time.monotonic()
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env={**os.environ, **self.env}
        )
        threading.Thread(target=self._read, daemon=True).start()
        while not self._ready.wait(0.02):
            if self.process.poll() is not None or time.monotonic() - begin > self.timeout_s:
                self.close()
                raise RuntimeError("server did not start:\n" + "".join(self.lines))
        self.start_seconds = time.monotonic() - begin
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = READY.search(line)
            if found and "serving" in line:
                self.url = f"http://{found[1]}:{found[2]}"
                self._ready.set()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if value is not None:
            print("".join(self.lines[-80:]), file=sys.stderr)

    def close(self) -> int:
        """SIGINT, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)

    def until_logged(self, text: str, seconds: float = 10.0) -> None:
        """Wait for a line that holds `text`; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while text not in self.log():
            assert time.monotonic() < deadline, f"{text!r} was not logged"
            time.sleep(0.01)

    def log(self) -> str:
        """All output so far."""
        return "".join(self.lines)

    def children(self) -> dict[str, psutil.Process]:
        """Role (`router`, `http`, …) to process; with several of a role the last one."""
        out = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            found = re.search(r"-m inferserve\.(\w+)", " ".join(child.cmdline()))
            if found:
                out[found[1]] = child
        return out

    def client(self) -> httpx.Client:
        """An HTTP client on the server's address."""
        return httpx.Client(base_url=self.url, timeout=60.0)

    def metrics(self) -> dict[str, float]:
        """Series (with labels, as printed) to value, from /metrics."""
        out = {}
        for line in httpx.get(self.url + "/metrics", timeout=10.0).text.splitlines():
            if line and not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                out[series] = float(value)
        return out

    def metric(self, name: str) -> float:
        """Sum of the series of family `name` (prefix `inferserve_` added)."""
        full = "inferserve_" + name
        return sum(v for k, v in self.metrics().items() if k == full or k.startswith(full + "{"))

    def wait_until_idle(self, seconds: float) -> float:
        """Seconds until nothing runs, nothing waits and no KV is in use.

        Raises AssertionError after `seconds` of a quiet machine, as many times more as this one is slower.
        """
        begin, limit = time.monotonic(), seconds
        while busy := {k: v for k, v in self.metrics().items() if k.split("{")[0] in _LOAD and v}:
            passed = time.monotonic() - begin
            if passed > limit:
                limit = seconds * slowness()
                assert passed <= limit, f"not idle after {passed:.1f} s: {busy}"
            time.sleep(0.02)
        return time.monotonic() - begin
