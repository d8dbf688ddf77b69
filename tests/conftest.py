"""What holds for all tests: signals as in a terminal, and the rule that no test may unpickle anything."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's interpreter runs the kernels. Read when triton is imported, hence so early.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every server that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pickle` is not a wire or file format here. (torch's own compile cache and hypothesis are not under test.)"""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something tried to unpickle")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
