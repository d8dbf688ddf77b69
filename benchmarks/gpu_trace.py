"""What a GPU did during some steps, from torch's profiler: how long it stood idle between them, and what took the time.

Idle is the time from the last kernel of a step to the first kernel of the next (copies are no kernels), as a share of the
step; "gaps" is every moment without a kernel or copy, inside of steps too. Steps are told apart by the kernel that begins
each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

FIRST_KERNEL = "_step_inputs_kernel"
_COPIES = ("Memcpy", "Memset")
_SHOWN = 12


def summary(run: Callable[[], object]) -> dict[str, Any]:
    """Profile `run`, which makes several steps and waits for them; shares in percent, times in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    return summarise(found)


def summarise(found: list[tuple[float, float, str]]) -> dict[str, Any]:
    """The figures of operations given as (start, end, name) in microseconds."""
    found = sorted(found)
    starts = [i for i, (_, _, name) in enumerate(found) if FIRST_KERNEL in name]
    if len(starts) < 3:
        return {"error": f"{len(starts)} steps in the trace"}
    begin, end = found[starts[0]][0], found[starts[-1]][0]
    idle, steps = 0.0, len(starts) - 1
    for at in starts[1:]:
        last = max(stop for _, stop, name in found[:at] if not name.startswith(_COPIES))
        idle += max(0.0, found[at][0] - last)
    inside = found[starts[0] : starts[-1]]
    busy, reached = 0.0, begin
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for start, stop, name in inside:
        busy += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, stop)
        by_name[name][0] += stop - start
        by_name[name][1] += 1
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:_SHOWN]
    return {
        "steps": steps,
        "step_us": round((end - begin) / steps, 1),
        "idle_percent": round(100 * idle / (end - begin), 2),
        "gaps_percent": round(100 * (1 - busy / (end - begin)), 2),
        "operations_per_step": round(len(inside) / steps, 1),
        "us_per_step": [
            {"name": name[:90], "us": round(us / steps, 1), "count": round(count / steps, 1)}
            for name, (us, count) in longest
        ],
    }
