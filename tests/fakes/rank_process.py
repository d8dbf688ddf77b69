"""`python -m tests.fakes.rank_process RANK SIZE RUN_DIR`: a rank that tries every operation, then loses the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch

from inferserve.errors import RankLost
from inferserve.parallel.process_group import joined


def main(rank: int, size: int, run_dir: Path) -> None:
    with torch.inference_mode(), joined(rank, size, "cpu", run_dir, "nccl") as ranks:
        assert (ranks.rank, ranks.size) == (rank, size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.full((3, 5), float(rank + 1), dtype=dtype)
            assert torch.equal(ranks.sum(x), torch.full((3, 5), size * (size + 1) / 2, dtype=dtype))
            parts = ranks.gather(torch.full((2, 3), float(rank), dtype=dtype))
            assert [part.unique().tolist() for part in parts] == [[float(i)] for i in range(size)]
        assert [part.shape for part in ranks.gather(torch.empty(0, 3))] == [(0, 3)] * size
        told = ranks.from_leader(torch.full((2, 4), rank + 7, dtype=torch.int32))
        assert told.unique().tolist() == [7]
        assert ranks.least(10 + rank) == 10
        listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}, listening
        assert ranks.least(1) == 1
        if rank:
            os._exit(9)
        try:
            ranks.sum(torch.ones(8))
        except RankLost as lost:
            print("lost:", lost)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
