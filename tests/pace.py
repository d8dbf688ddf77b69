"""How slow the machine is at this moment, so that limits in seconds mean the same on a busy one."""

from __future__ import annotations

import subprocess
import sys
import time

_STARTS = 3
_QUIET_S = 0.02
_MOST = 4.0


def slowness() -> float:
    """From 1 to 4: the time to start an interpreter, in units of what the quiet reference machine takes."""
    begin = time.monotonic()
    for _ in range(_STARTS):
        subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    return min(_MOST, max(1.0, (time.monotonic() - begin) / _STARTS / _QUIET_S))
