"""One saved tiny model a session for each family, and backends over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.torch_backend import TorchBackend
from tests.parity.driver import Driver
from tests.parity.tiny import BY_NAME, LONGEST, Oracle, make

ROWS = 9


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Name of a tiny model → the saved model and transformers' answers."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = make(BY_NAME[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


def server_config(folder: Path, **settings: Any) -> ServerConfig:
    """A resolved configuration for a model folder; on the CPU unless `device` says otherwise."""
    facts = ModelFacts(folder=str(folder), gguf_file=str(settings.pop("gguf_file", "")))
    longest = settings.pop("max_req_total_len", LONGEST)
    device = settings.pop("device", "cpu")
    return ServerConfig(
        model=ModelPart(max_req_total_len=longest, eos_id=(2,), data_type=settings.pop("data_type", "float32")),
        engine=EnginePart(
            device=device,
            attention_backend="triton" if device == "cuda" else "reference",
            cpu_threads=settings.pop("cpu_threads", 1),
            max_total_token_num=settings.pop("kv_tokens", 4096),
            **settings,
        ),
        schedule=SchedulePart(running_max_req_size=ROWS),
        facts=facts,
    )


@pytest.fixture
def driver(oracle: Callable[[str], Oracle]) -> Callable[..., Driver]:
    """Name of a tiny model → a driver over a started backend."""

    def make_driver(name: str, *, prefix_cache: bool, chunk: int) -> Driver:
        config = server_config(oracle(name).folder)
        backend = TorchBackend(config, ROWS)
        facts = backend.start()
        return Driver(
            backend, kv_tokens=facts.kv_tokens, max_rows=ROWS, max_len=LONGEST, prefix_cache=prefix_cache, chunk=chunk
        )

    return make_driver
