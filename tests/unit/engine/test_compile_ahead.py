"""Children that compile ahead: each keeps to its share, all shares together are everything, the slow are ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from triton.backends.compiler import GPUTarget

from inferserve.engine.compile_ahead import Compilers

TARGET = GPUTarget("cuda", 90, 32)

SHARES = """
import torch
from inferserve.engine.compile_ahead import ModelLaunches, compile_only
from tests.kernels.compile_for_gpu import SPEC
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

names = []
JITFunction.run = lambda function, *args, **options: names.append(function.fn.__name__)
compile_only(GPUTarget("cuda", 90, 32), lambda *_: None, {share}, {shares})
ModelLaunches(SPEC, torch.bfloat16, None, 8, 64).make()
print(" ".join(sorted(set(names))))
"""


@dataclass(frozen=True)
class Launches:
    """Stands in for a model's: takes its time, then fails or not."""

    seconds: float = 0.0
    fails: bool = False

    def make(self) -> None:
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError


@pytest.mark.parametrize(("launches", "done"), [(Launches(), 3), (Launches(fails=True), 0)])
def test_children_end(launches: Launches, done: int) -> None:
    assert Compilers(launches, TARGET, range(3), 3).wait(20.0) == done


def test_children_that_take_too_long_are_ended() -> None:
    compilers = Compilers(Launches(60.0), TARGET, range(2), 2)
    children = list(compilers._children)
    started = time.monotonic()
    assert compilers.wait(0.2) == 0
    assert time.monotonic() - started < 10
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_child_dies_with_its_parent() -> None:
    script = (
        "import os, time\n"
        "from inferserve.engine.compile_ahead import Compilers\n"
        "from tests.unit.engine.test_compile_ahead import Launches, TARGET\n"
        "print(Compilers(Launches(60.0), TARGET, range(1), 1)._children[0], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watched = os.pidfd_open(child)
        time.sleep(0.5)  # until it has asked to
        parent.send_signal(signal.SIGKILL)
    assert select.select([watched], [], [], 10.0)[0]
    os.close(watched)


def test_shares_make_up_the_whole() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def launched(share: int, shares: int) -> list[str]:
        command = [sys.executable, "-c", SHARES.format(share=share, shares=shares)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
        return done.stdout.split()

    whole, halves = launched(0, 1), [launched(i, 2) for i in range(2)]
    assert {"_decode_kernel", "_prefill_kernel", "_rope_write_kernel", "_step_outputs_kernel"} <= set(whole)
    assert all(halves) and set(halves[0]) | set(halves[1]) == set(whole)
