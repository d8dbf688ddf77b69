"""One fake-engine server and one real SmolLM2 server for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import RunningServer


@pytest.fixture(scope="session")
def fake_server() -> Iterator[RunningServer]:
    with RunningServer("--engine", "fake", "--fake-step-ms", "2", "--running-max-req-size", "512") as server:
        yield server


@pytest.fixture(scope="session")
def model_server() -> Iterator[RunningServer]:
    with RunningServer("--data-type", "float32", "--max-req-total-len", "2048", timeout_s=180) as server:
        yield server
