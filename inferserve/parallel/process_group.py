"""`ProcessGroup`: ranks over torch.distributed, NCCL between GPUs and gloo between processes on a CPU.

Rendezvous is through a file in the private directory of the boot, so that nothing listens for it (torch's TCPStore
would, on every interface); gloo's and NCCL's own sockets are pinned to loopback by the environment that the launcher
gives to engines. A broken collective is a `RankLost`: which rank it was, the launcher knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from inferserve.errors import ConfigError, RankLost
from inferserve.parallel.all_reduce import AllReduce, Collective, Symmetric, reachable
from inferserve.parallel.ranks import LEADER

TIMEOUT_S = 300.0
"""How long a rank waits in a collective. At start the others may still be loading weights."""
_STORE = "ranks"

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The same operation; torch 2.13 renamed it."""


@contextmanager
def _together() -> Iterator[None]:
    """What torch raises in a collective, as RankLost; a lack of memory is this rank's own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise RankLost(f"the other engine ranks do not answer: {first}") from error


class ProcessGroup:
    """See `ranks.Ranks`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, all_reduce: AllReduce) -> None:
        self._group = group
        self._device = device
        self._all_reduce = all_reduce
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        with _together():
            return self._all_reduce.sum(x)

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Ranks."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with _together():
            _gather(out, x.contiguous(), group=self._group)
        return out.view(self.size, *x.shape).unbind()

    def from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        with _together():
            dist.broadcast(x, src=LEADER, group=self._group)
        return x

    def least(self, number: int) -> int:
        """See Ranks."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        with _together():
            dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self._group)
            return int(value.item())


@contextmanager
def joined(rank: int, size: int, device_type: str, run_dir: Path, all_reduce: str) -> Iterator[ProcessGroup]:
    """Meet the other ranks, and be one of them while the block runs.

    Args:
        rank, size: which one this is of how many.
        device_type: cpu, or cuda: then GPU number `rank` becomes the current device.
        run_dir: private directory that all ranks share.
        all_reduce: `--all-reduce`.

    Raises ConfigError if there are fewer GPUs, RankLost if the others do not come.
    """
    device = _own_device(rank, size, device_type)
    with _together():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.FileStore(str(run_dir / _STORE), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=None if device.type == "cpu" else device,
        )
    group = dist.group.WORLD
    ranks = ProcessGroup(group, device, Collective(group))
    if all_reduce == "symmetric" and device.type == "cuda" and ranks.least(reachable(rank, size)):
        ranks = ProcessGroup(group, device, Symmetric.between(group, device, Collective(group)))
    try:
        yield ranks
    finally:
        if device.type == "cpu":  # NCCL would wait for work in flight, which may never end
            dist.destroy_process_group()


def _own_device(rank: int, size: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < size:
        raise ConfigError(f"--tp {size}: torch finds {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
