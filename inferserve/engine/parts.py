"""Which backend runs the steps. Imports torch only when it is asked for."""

from __future__ import annotations

from inferserve.config.schema import ServerConfig
from inferserve.engine.step import EngineBackend


def make_backend(config: ServerConfig, max_rows: int) -> EngineBackend:
    """The backend that `--engine` names, not started.

    Args:
        max_rows: sequences that may run at once; rows are in [0, max_rows).
    """
    if config.engine.engine == "fake":
        from inferserve.engine.fake import FakeBackend

        return FakeBackend(config, max_rows)
    from inferserve.engine.torch_backend import TorchBackend

    return TorchBackend(config, max_rows)
