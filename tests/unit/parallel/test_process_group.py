"""Ranks over real processes and gloo: every operation, loopback alone, and the end of one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inferserve.config.env import child_environment
from inferserve.parallel import all_reduce
from inferserve.parallel.ranks import ALONE, LEADER


@pytest.mark.parametrize("size", [3])
def test_every_operation_and_a_lost_rank(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-m", "tests.fakes.rank_process"]
    env = child_environment(one_thread=False) | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert said[LEADER][0].startswith("lost: the other engine ranks do not answer: "), said
    assert [rank.returncode for rank in ranks] == [0] + [9] * (size - 1), said


def test_sockets_of_ranks_are_pinned_to_loopback() -> None:
    env = child_environment(one_thread=False)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_alone() -> None:
    x = torch.arange(6.0)
    assert ALONE.sum(x) is x
    assert ALONE.gather(x) == (x,)
    assert ALONE.from_leader(x) is x
    assert ALONE.least(5) == 5
    assert (ALONE.rank, ALONE.size) == (0, 1)


class _Rest:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(x.numel())
        return x


def test_symmetric_sums_go_by_size_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice alone: the operations themselves need GPUs that reach each other."""
    calls: list[tuple[str, int]] = []

    def one_shot(shared: torch.Tensor, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        calls.append(("one", x.numel()))
        assert shared.shape == x.shape and shared.dtype == x.dtype
        return x * 2

    def two_shot(shared: torch.Tensor, op: str, group: str) -> torch.Tensor:
        calls.append(("two", shared.numel()))
        return shared.mul_(2)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", one_shot, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", two_shot, raising=False)
    rest = _Rest()
    buffer = torch.empty(all_reduce.SYMMETRIC_BYTES, dtype=torch.uint8)
    symmetric = all_reduce.Symmetric(buffer, "g", 2, rest)
    for count, dtype in (
        (4096, torch.bfloat16),
        (2**17, torch.bfloat16),
        (2**18, torch.bfloat16),
        (2**20, torch.float32),
    ):
        assert torch.equal(symmetric.sum(torch.ones(1, count, dtype=dtype)), torch.full((1, count), 2, dtype=dtype))
    assert calls == [("one", 4096), ("one", 2**17), ("two", 2**18), ("two", 2**20)]
    for count, dtype in ((2**23, torch.bfloat16), (4096, torch.float16), (3, torch.float32)):
        symmetric.sum(torch.ones(count, dtype=dtype))
    assert rest.asked == [2**23, 4096, 3]
