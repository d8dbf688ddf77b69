"""The kernels on a GPU in one bounded run: checks against their twins, timings against ceilings, launch choices.

    python -m benchmarks.kernels_gpu [--seconds 90] [--parts check,time,tune,pages] [--out FILE.json]

Checks run in several processes, which also compile the kernels for the other parts; a case that fails, or takes its
process with it, is reported and the rest goes on. What does not fit into --seconds is named. Exit code 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import schema

_SHARDS = 10
_CHECK_SHARE = 0.5
"""Of the seconds, at most, for checks when there are other parts."""


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--parts", default="check,time,tune,pages")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_gpu.json")
    parser.add_argument("--shard", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    schema.require_gpu()
    end = time.monotonic() + args.seconds
    if args.shard >= 0:
        run_shard(args.shard, end)
        return 0
    parts = args.parts.split(",")
    figures: dict[str, Any] = {}
    bad = 0
    if "check" in parts:
        share = 1.0 if parts == ["check"] else _CHECK_SHARE
        figures["checks"] = run_checks(args.seconds * share)
        bad = sum(not check["passed"] for check in figures["checks"])
    ratios: dict[str, float] = {}
    if parts != ["check"]:
        figures |= measure(parts, end)
        ratios = {timing["name"]: round(timing["share"], 3) for timing in figures.get("timings", [])}
    schema.write(
        args.out, schema.result("kernels_gpu", {"parts": args.parts, "seconds": args.seconds}, figures, ratios)
    )
    return 1 if bad else 0


def run_shard(number: int, end: float) -> None:
    """Every `_SHARDS`-th check, one JSON line each, then of the compilations."""
    import torch

    from benchmarks.kernel_checks import TOLERANCE, checks
    from benchmarks.kernel_timings import compile_all

    for name, check in list(checks())[number::_SHARDS]:
        if time.monotonic() > end:
            break
        found: dict[str, Any] = {"name": name}
        try:
            with torch.inference_mode():
                found["error"] = check()
                torch.cuda.synchronize()
            found["passed"] = found["error"] <= TOLERANCE
        except Exception as problem:
            found |= {"passed": False, "problem": f"{type(problem).__name__}: {str(problem)[:300]}"}
        print(json.dumps(found), flush=True)
        torch.cuda.empty_cache()
    for _, compile_one in list(compile_all())[number::_SHARDS]:
        if time.monotonic() > end:
            break
        try:
            compile_one()
        except Exception:
            continue


def run_checks(seconds: float) -> list[dict[str, Any]]:
    """All shards at once; what they said, and what they did not come to say."""
    command = [sys.executable, "-m", "benchmarks.kernels_gpu", "--seconds", str(seconds)]
    shards = [
        subprocess.Popen([*command, "--shard", str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(_SHARDS)
    ]
    deadline, found = time.monotonic() + seconds + 5, []
    for i, shard in enumerate(shards):
        try:
            out, problems = shard.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            shard.kill()
            out, problems = shard.communicate()
        found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if shard.returncode:
            found.append(
                {"name": f"shard {i}", "passed": False, "problem": f"exit {shard.returncode}: {problems[-300:]}"}
            )
    for check in found:
        if not check["passed"]:
            print(f"  FAILED {check['name']}: {check.get('problem', check.get('error'))}")
    passed = sum(check["passed"] for check in found)
    worst = max((check["error"] for check in found if "error" in check), default=float("nan"))
    print(f"checks: {passed} of {len(found)} passed, worst relative error {worst:.1e}", flush=True)
    return found


def measure(parts: list[str], end: float) -> dict[str, Any]:
    """Timings, launch choices and what pages are worth, while there is time."""
    import torch

    from benchmarks import kernel_timings as timings

    figures: dict[str, Any] = {}
    with torch.inference_mode():
        copy = timings.copy_rate()
        figures["copy_tb_s"] = copy / 1e12
        print(f"copy {copy / 1e12:.2f} TB/s")
        if "time" in parts:
            cases = [*timings.decode_cases(copy), *timings.prefill_cases(), timings.mixed_case(copy)]
            figures["timings"] = [asdict(timing) for _, timing in _each(cases, end, _show_timing)]
        if "tune" in parts:
            figures["choices"] = dict(_each(timings.tune(), end, _show_choices))
        if "pages" in parts:
            figures["pages"] = [asdict(timing) for _, timing in _each(timings.page_cases(copy), end, _show_timing)]
    return figures


def _each(
    cases: Iterable[tuple[str, Callable[[], Any]]], end: float, show: Callable[[str, Any], None]
) -> list[tuple[str, Any]]:
    import torch

    done = []
    for name, case in cases:
        if time.monotonic() > end:
            print(f"  {name}: no time left")
            continue
        try:
            done.append((name, case()))
            show(*done[-1])
        except Exception as problem:
            print(f"  FAILED {name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        torch.cuda.empty_cache()
    return done


def _show_timing(_: str, timing: Any) -> None:
    wanted = f"wanted {timing.wanted:.0%}" if timing.wanted else ""
    print(
        f"  {timing.name:38s} {timing.us:9.1f} us  {timing.rate:7.2f} of {timing.ceiling:7.2f} = {timing.share:6.1%} {wanted}",
        flush=True,
    )


def _show_choices(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"  {name}")
    for row in rows[:5]:
        print("     " + " ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    for row in rows:
        if "problem" in row:
            print("     " + str(row))


if __name__ == "__main__":
    sys.exit(main())
