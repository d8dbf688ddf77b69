"""Which backend runs the steps, and with whom. Imports torch only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from inferserve.config.schema import ServerConfig
from inferserve.engine.step import EngineBackend

if TYPE_CHECKING:
    from inferserve.parallel.ranks import Ranks


@contextmanager
def meet(config: ServerConfig, rank: int, run_dir: Path) -> Iterator[Ranks | None]:
    """The ranks of this engine while the block runs; None for the fake engine, whose ranks have nothing to exchange.

    Raises RankLost if the others do not come.
    """
    if config.engine.engine == "fake":
        yield None
        return
    from inferserve.parallel.process_group import joined
    from inferserve.parallel.ranks import ALONE

    if config.parallel.tp == 1:
        yield ALONE
        return
    with joined(rank, config.parallel.tp, config.engine.device, run_dir, config.parallel.all_reduce) as ranks:
        yield ranks


def make_backend(config: ServerConfig, max_rows: int, ranks: Ranks | None = None) -> EngineBackend:
    """The backend that `--engine` names, not started.

    Args:
        max_rows: sequences that may run at once; rows are in [0, max_rows).
        ranks: who shares the model, as `meet` says; None = nobody.
    """
    if config.engine.engine == "fake":
        from inferserve.engine.fake import FakeBackend

        return FakeBackend(config, max_rows)
    from inferserve.engine.torch_backend import TorchBackend
    from inferserve.parallel.ranks import ALONE

    return TorchBackend(config, max_rows, ranks or ALONE)
