"""`Launched`: the real launcher with scripted children, its status file, and what each child saw."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROLES = ("engine-0", "http-0", "detokenize", "router", "metrics")
_SERVING = re.compile(r"serving .* on (http://\S+) in")


class Launched:
    """Start in a `with` block; nothing of it outlives the block."""

    def __init__(self, folder: Path, model: Path, *flags: str, runs: Path | None = None, **scripts: Any) -> None:
        self.runs = runs or folder / "run"
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        env = {**os.environ, "INFERSERVE_RUN_DIR": str(self.runs), "FAKE_CHILDREN_LOG": str(self.notes)}
        env["FAKE_CHILDREN"] = json.dumps({name.replace("_", "-"): script for name, script in scripts.items()})
        fixed = ["--engine", "fake", "--model-dir", str(model), "--port", "0"]
        command = [sys.executable, "-m", "tests.fakes.launcher", *fixed, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pids = self.pids()
        self.process.kill()
        self.process.wait()
        for pid in pids.values():
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        if error is not None:
            print("".join(self.lines), file=sys.stderr)

    def until(self, what: Callable[[], Any], seconds: float = 10.0) -> Any:
        """The first true value of `what()`; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            time.sleep(0.01)
        raise AssertionError("".join(self.lines) or "nothing was logged")

    def serving(self) -> str:
        """Wait until it serves; the URL."""
        return self.until(lambda: next((m[1] for line in self.lines if (m := _SERVING.search(line))), None))

    def status(self) -> dict[str, Any]:
        """The status file of this launcher, {} when there is none."""
        for path in self.runs.glob("boot-*/status.json"):
            status = json.loads(path.read_text())
            if status["launcher"] == self.process.pid:
                return status
        return {}

    def pids(self) -> dict[str, int]:
        """Process name to pid, as the status file says."""
        return {name: entry["pid"] for name, entry in self.status().get("processes", {}).items()}

    def saw(self, name: str) -> list[str]:
        """What the child called `name` noted."""
        path = self.notes / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def end(self, seconds: float = 10.0) -> int:
        """Wait for the exit status."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def logged(self, text: str) -> bool:
        """Whether a line on stderr holds `text`."""
        return any(text in line for line in self.lines)

    def last_line(self) -> str:
        """The last line on stderr."""
        return self.lines[-1].rstrip() if self.lines else ""
