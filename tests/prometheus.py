"""A real Prometheus server (Debian's package `prometheus`) that scrapes one target, and its query API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

# Where CI runs, a missing binary is a failure, not a reason to skip.
needs_prometheus = pytest.mark.skipif(
    (shutil.which("prometheus") is None or shutil.which("promtool") is None) and not os.environ.get("CI"),
    reason="Debian package prometheus is not installed",
)


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """`promtool` with `text` on its standard input."""
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60)


class Prometheus:
    """Scrapes `target` (host:port) every 200 ms while the block runs; data in `folder`."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def __enter__(self) -> Prometheus:
        config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "scrape_configs": [{"job_name": "inferserve", "static_configs": [{"targets": [self._target]}]}],
        }
        file = self._folder / "prometheus.json"  # JSON is YAML
        file.write_text(json.dumps(config))
        self._log = (self._folder / "log").open("wb")
        command = [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.wait_for("up", 1.0, timeout_s=30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def api(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its HTTP API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> dict[tuple[str, ...], float]:
        """Label values of each series of the result, without name, job and instance, to its value now."""
        hidden = {"__name__", "job", "instance", "model_name", "engine"}
        return {
            tuple(v for k, v in sorted(series["metric"].items()) if k not in hidden): float(series["value"][1])
            for series in self.api("query", query=expr)["result"]
        }

    def value(self, expr: str) -> float | None:
        """The only value of the result, None when there is none."""
        found = list(self.query(expr).values())
        assert len(found) <= 1, (expr, found)
        return found[0] if found else None

    def wait_for(self, expr: str, wanted: float, timeout_s: float = 10.0) -> None:
        """Wait until `expr` has the one value `wanted`; AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        value: float | str | None = None
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            try:
                value = self.value(expr)
            except httpx.TransportError as error:  # not listening yet
                value = str(error)
            if value == wanted:
                return
            time.sleep(0.1)
        raise AssertionError(f"{expr} is {value}, not {wanted}, after {timeout_s} s")
