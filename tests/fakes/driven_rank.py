"""`python -m tests.fakes.driven_rank RANK SIZE RUN_DIR FOLDER DEVICE DATA_TYPE ALL_REDUCE`: a rank that answers prompts.

It reads them from standard input and writes its answers to standard output, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from inferserve.config.schema import ParallelPart
from inferserve.engine.parts import make_backend, meet
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import Driver
from tests.parity.tiny import LONGEST


def main(rank: int, size: int, run_dir: Path, folder: Path, device: str, data_type: str, all_reduce: str) -> None:
    prompts = json.load(sys.stdin)
    config = server_config(folder, device=device, data_type=data_type, kv_tokens=2048)
    config = replace(config, parallel=ParallelPart(tp=size, all_reduce=all_reduce))
    with meet(config, rank, run_dir) as ranks:
        backend = make_backend(config, ROWS, ranks)
        tokens = backend.start().kv_tokens
        driver = Driver(backend, kv_tokens=tokens, max_rows=ROWS, max_len=LONGEST, prefix_cache=True, chunk=7)
        json.dump(driver.generate(prompts, 24, batch=5, pause_every=11), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:8])
