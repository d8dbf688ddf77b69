"""`python -m tests.fakes.launcher FLAGS…`: the real `inferserve serve`, whose processes are `tests.fakes.child`."""

from __future__ import annotations

import sys
from dataclasses import replace

from inferserve.config import cli
from inferserve.launch.processes import TABLE
from inferserve.launch.serve import serve
from inferserve.launch.signals import Interrupted, Signals


def main() -> int:
    """As `inferserve.launch.cli` does it, with another table."""
    with Signals() as signals:
        table = [replace(spec, module="tests.fakes.child") for spec in TABLE]
        try:
            return serve(cli.parse(sys.argv[1:]), signals, table)
        except Interrupted:
            return 0


if __name__ == "__main__":
    sys.exit(main())
