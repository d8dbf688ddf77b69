"""Fused layer kernels and the sampler on a GPU: checked against their torch twins in bf16, then timed against the copy rate.

    python -m benchmarks.fused_gpu [--limit 40] [--no-checks] [--out FILE]

A floor is the fewest bytes a kernel can move over the rate of a large copy, measured in the same run. Kernels are timed
in CUDA graphs. The sampler is timed twice: the host's own time of a call, and the device's with all launches waiting for it.
Each case stands alone: one that fails is reported and the rest runs; what does not fit into --limit seconds is named.
About 35 s on an H200 with no compiled kernels. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import fused_checks, schema
from benchmarks.fused_inputs import (
    BF16,
    DEVICE,
    EIGHT_B,
    KINDS,
    SMALL,
    VOCAB,
    ModelShape,
    RopeCase,
    filter_params,
    make_sampler,
    random,
    rope_case,
)
from inferserve.kernels import activation, argmax, logit_pieces, norm, rope_write, sampling_filter
from inferserve.kernels.logit_pieces import TileConfig

TOKENS = (1, 64, 256, 4096)
SAMPLED = (1, 64, 256)
_SETS = 3
"""Inputs take turns, so that large ones come from memory, as they do in a model."""
_SLEEP = 40_000_000
"""Cycles that the device is kept busy with while the host launches."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a case, and of its floor (0 = none)."""

    name: str
    us: float
    floor_us: float = 0.0
    host_us: float = 0.0

    def __str__(self) -> str:
        share = f"  {100 * self.floor_us / self.us:5.1f} % of copy" if self.floor_us else ""
        host = f"  host {self.host_us:7.1f} us" if self.host_us else ""
        return f"{self.name:58s} {self.us:9.2f} us{share}{host}"


def graph_us(calls: Sequence[Callable[[], object]], rounds: int = 6) -> float:
    """Median microseconds of one call, the calls taking turns in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second, read plus written."""
    source = random(2**29)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us([partial(target.copy_, source)], 3) * 1e6


class Timings:
    """All timed cases, those that matter most first. Bytes over `rate` are floors."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def _timed(self, name: str, calls: Sequence[Callable[[], object]], moved: float) -> Timing:
        return Timing(name, graph_us(calls), moved / self._rate * 1e6)

    def cases(self) -> Iterator[tuple[str, Callable[[], Timing]]]:
        """Names and what measures them."""
        for shape in (EIGHT_B, SMALL):
            for tokens in TOKENS:
                label = f"{shape.name}, {tokens} tokens"
                yield f"add + norm, {label}", partial(self._add_norm, shape, tokens)
                yield f"silu x up, {label}", partial(self._silu, shape, tokens)
                yield f"norm, rotary, KV write, {label}", partial(self._rope, shape, tokens, BF16)
        for kind in KINDS:
            for rows in SAMPLED:
                yield f"sampler, {kind}, {rows} rows", partial(self._sampler, kind, rows)
        for rows in SAMPLED:
            yield f"argmax, {rows} rows", partial(self._argmax, rows)
        for config in (TileConfig(8192, 32), TileConfig(4096, 16), TileConfig(8192, 16)):
            for kind in ("top-p 0.9", "top-k 50", "temperature"):
                for rows in SAMPLED:
                    name = f"filter {config.block}/{config.warps}, {kind}, {rows} rows"
                    yield name, partial(self._filter, config, kind, rows)
        yield "norm, rotary, KV write fp8, 8B, 256 tokens", partial(self._rope, EIGHT_B, 256, torch.float8_e4m3fn)
        for tokens in (1, 64, 4096):
            yield f"embedding (torch), 8B, {tokens} tokens", partial(self._embedding, tokens)
            for shape, warps in ((EIGHT_B, (4, 16)), (SMALL, (1, 4))):
                for count in warps:
                    name = f"add + norm, {shape.name}, {tokens} tokens, {count} warps"
                    yield name, partial(self._add_norm, shape, tokens, norm.NormConfig(1, count))

    def _add_norm(self, shape: ModelShape, tokens: int, config: norm.NormConfig | None = None) -> Timing:
        weight = random(shape.size)
        sets = [(random(tokens, shape.size), random(tokens, shape.size)) for _ in range(_SETS)]
        calls = [partial(norm._launch, x, residual, weight, 1e-5, config) for x, residual in sets]
        return self._timed("", calls, 8 * tokens * shape.size)

    def _silu(self, shape: ModelShape, tokens: int) -> Timing:
        calls = [partial(activation.silu_mul, random(tokens, 2 * shape.inner)) for _ in range(_SETS)]
        return self._timed("", calls, 6 * tokens * shape.inner)

    def _rope(self, shape: ModelShape, tokens: int, stored: torch.dtype) -> Timing:
        cases = [rope_case(shape, tokens, stored) for _ in range(_SETS)]
        moved = cases[0].qkv.nbytes + 2 * tokens * shape.q_heads * shape.head_dim
        moved += 2 * tokens * shape.kv_heads * shape.head_dim * stored.itemsize + 4 * tokens * shape.head_dim
        return self._timed("", [partial(RopeCase.run, case, rope_write.rope_write) for case in cases], moved)

    def _embedding(self, tokens: int) -> Timing:
        table = random(VOCAB, EIGHT_B.size)
        ids = torch.randint(VOCAB, (tokens,), device=DEVICE)
        call = partial(torch.nn.functional.embedding, ids, table)
        return self._timed("", [call], 4 * tokens * EIGHT_B.size)

    def _argmax(self, rows: int) -> Timing:
        logits = random(rows, VOCAB)
        return self._timed("", [partial(argmax.argmax, logits)], logits.nbytes)

    def _filter(self, config: TileConfig, kind: str, rows: int) -> Timing:
        logits, out = random(rows, VOCAB) * 2.5, torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        params, before = filter_params(kind, rows), logit_pieces.FILTER
        logit_pieces.FILTER = config
        try:
            return self._timed("", [partial(sampling_filter.filter_sample, logits, params, out)], 2 * rows * VOCAB)
        finally:
            logit_pieces.FILTER = before

    def _sampler(self, kind: str, rows: int) -> Timing:
        sampler, logits, numbers = make_sampler(kind, rows)
        at = iter(range(1, 1000))
        for _ in range(3):
            sampler.sample(logits, numbers, numbers * 0 + next(at))
        device = min(self._behind(lambda: sampler.sample(logits, numbers, numbers * 0 + next(at))) for _ in range(2))
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            sampler.sample(logits, numbers, numbers * 0 + next(at))
            times.append(time.perf_counter() - began)
        return Timing("", device, logits.nbytes / self._rate * 1e6, statistics.median(times) * 1e6)

    @staticmethod
    def _behind(call: Callable[[], object], count: int = 8) -> float:
        """Device time of a call, its launches queued behind something long."""
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count


def guarded(name: str, work: Callable[[], Any], failures: list[str]) -> Any:
    """The result of `work`; None, and a line about it, if it fails."""
    try:
        return work()
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        traceback.print_exc(limit=-3)
        return None


def run_checks(deadline: float, failures: list[str]) -> dict[str, float]:
    """Errors by name; those over the tolerance are failures."""
    errors: dict[str, float] = {}
    for name, check, tolerance in fused_checks.checks():
        if time.monotonic() > deadline:
            print(f"  no time for the check {name}")
            continue
        error = guarded(name, check, failures)
        if error is not None:
            errors[name] = error
            if not error <= tolerance:
                failures.append(f"{name}: error {error:.2e}, at most {tolerance:.0e}")
    print(
        f"{len(errors)} checks, worst error {max(errors.values(), default=0.0):.1e}, {len(failures)} failed", flush=True
    )
    return errors


def run_timings(deadline: float, failures: list[str]) -> tuple[float, list[Timing]]:
    """Copy rate in bytes/s, and all that fits into the time."""
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s", flush=True)
    done: list[Timing] = []
    for name, measure in Timings(rate).cases():
        if time.monotonic() > deadline:
            print(f"  no time for {name} and what follows")
            break
        timing = guarded(name, measure, failures)
        if timing is not None:
            done.append(Timing(name, timing.us, timing.floor_us, timing.host_us))
            print(f"  {done[-1]}", flush=True)
    return rate, done


@torch.inference_mode()
def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fused_gpu.json")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds")
    parser.add_argument("--no-checks", action="store_true", help="timings only")
    args = parser.parse_args()
    schema.require_gpu()
    began = time.monotonic()
    failures: list[str] = []
    errors: dict[str, float] = {}
    if not args.no_checks:
        errors = run_checks(began + 0.6 * args.limit, failures)
    rate, timings = run_timings(began + args.limit, failures)
    figures = {
        "copy_bytes_per_s": rate,
        "check_errors": errors,
        "us": {t.name: t.us for t in timings},
        "sampler_host_us": {t.name: t.host_us for t in timings if t.host_us},
        "failures": failures,
    }
    ratios = {f"{t.name}: share of the copy rate": t.floor_us / t.us for t in timings if t.floor_us}
    settings = {"vocab": VOCAB, "limit_s": args.limit}
    schema.write(args.out, schema.result("fused_gpu", settings, figures, ratios))
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(timings)} timings, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
