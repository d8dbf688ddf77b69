"""What steps take on this machine: made-up ones are run and timed after loading, and the cost model is fitted to them.

They are run as the worker runs real ones, the next launched before the last is read, so that the host's share of a step
is hidden as far as it will be. Every context has places of its own: shared ones would be read from the device's caches.
Bounded in time; knows nothing of what the backend is.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from inferserve.config.schema import ServerConfig
from inferserve.engine.cost_model import CostModel, StepCost, chunk_pairs, fit
from inferserve.engine.step import EngineBackend, Ints, StepBatch
from inferserve.engine.warmup import Extent, largest
from inferserve.log import event
from inferserve.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

LIMIT_S = 4.0
_TIMED = 3
_SLOW_S = 0.1
_LARGE = 1024
"""Tokens of a step beside which the host's share is nothing."""
_TOKEN = 1
_GREEDY = SamplingParams(temperature=0.0)
_ROWS = (1, 32, 64, 128, 256)
_CHUNKS = (64, 256, 1024, 128, 512, 4096, 2048)
_MIXED = (64, 192, 448, 960)
_CONTEXT = 1024
_LONG_CONTEXT = 8192


@dataclass(frozen=True)
class MadeUp:
    """A step of `decode` rows that compute their `length`-th token, and one chunk (or 0) behind `before` tokens."""

    decode: int
    length: int
    chunk: int = 0
    before: int = 0

    @property
    def places(self) -> int:
        """KV tokens that it reads or writes."""
        return self.decode * self.length + self.chunk + self.before

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.decode + (self.chunk > 0)

    @property
    def width(self) -> int:
        """Tokens of its longest row."""
        return max(self.length, self.before + self.chunk)

    @property
    def cost(self) -> StepCost:
        """What its time depends on."""
        pairs = chunk_pairs(self.before, self.chunk)
        return StepCost(self.decode + self.chunk, self.decode * self.length, pairs, self.rows)

    def batch(self, table: Ints) -> StepBatch:
        """The step; every row samples. Writes to `table`, int32 [more than decode rows, length or before + chunk]."""
        decode, chunk = self.decode, self.chunk
        rows = np.arange(self.rows, dtype=np.int32)
        contexts = np.arange(decode * self.length, dtype=np.int32).reshape(decode, self.length)
        own = np.arange(decode * self.length, self.places, dtype=np.int32)
        table[:decode, : self.length] = contexts
        lengths, queries = [self.length] * decode, [1] * decode
        if chunk:
            table[decode, : len(own)] = own
            lengths, queries = [*lengths, len(own)], [*queries, chunk]
        positions = np.concatenate((np.full(decode, self.length - 1), np.arange(self.before, self.before + chunk)))
        return StepBatch(
            step=0,
            rows=rows,
            num_decode=decode,
            query_len=np.array(queries, np.int32),
            kv_len=np.array(lengths, np.int32),
            token_ids=np.full(decode + chunk, _TOKEN, np.int32),
            positions=positions.astype(np.int32),
            kv_index=np.concatenate((contexts[:, -1], own[self.before :])).astype(np.int32),
            table=table,
            new_prefix=tuple((int(row), n - q) for row, n, q in zip(rows, lengths, queries, strict=True) if n > q),
            sample=rows.copy(),
            out_position=np.ones(len(rows), np.int32),
        )


def made_up_steps(extent: Extent, places: int) -> list[MadeUp]:
    """Steps that tell the parts of the cost apart, the most telling first, as far as they fit.

    Args:
        extent: limits of a step and of one sequence.
        places: KV tokens of the pool.
    """
    context = min(_CONTEXT, extent.length)
    rows = [n for n in _ROWS if n <= extent.rows]
    decode, chunks = [MadeUp(n, context) for n in rows], [MadeUp(0, 1, n) for n in _CHUNKS]
    steps = [step for pair in itertools.zip_longest(decode, chunks) for step in pair if step]
    steps += [MadeUp(min(64, max(1, extent.rows - 1)), context // 2, n) for n in _MIXED]
    steps += [MadeUp(0, 1, n, _LONG_CONTEXT) for n in (256, 1024)]
    steps += [MadeUp(n, min(64, context)) for n in rows]
    return [s for s in steps if _fits(s, extent, places)]


def _fits(step: MadeUp, extent: Extent, places: int) -> bool:
    return (
        step.places <= places
        and step.decode + step.chunk <= extent.tokens
        and step.chunk <= extent.chunk
        and step.width <= extent.length
        and step.rows <= extent.rows
    )


def calibrated(config: ServerConfig, backend: EngineBackend, places: int) -> CostModel | None:
    """The cost model for a backend that has just started; None where no flag asks for times, or a step fails.

    Every rank calls this: their steps are one step. Only one that is alone may let the clock decide what it runs, and
    go on after a failure.

    Args:
        places: KV tokens of the pool; what is in it is lost.
    """
    schedule = config.schedule
    if schedule.target_step_ms <= 0 and schedule.target_step_ratio <= 0:
        return None
    extent = largest(config, schedule.running_max_req_size)
    steps = made_up_steps(extent, places)
    if config.parallel.tp > 1:
        return calibrate(backend, steps, time.monotonic_ns, math.inf)
    try:
        return calibrate(backend, steps, time.monotonic_ns)
    except Exception:
        log.exception("steps cannot be timed; they will be as large as --batch-max-tokens allows")
        return None


def calibrate(
    backend: EngineBackend, steps: Sequence[MadeUp], clock: Callable[[], int], limit_s: float = LIMIT_S
) -> CostModel:
    """Time `steps` and fit the model.

    Args:
        backend: started, and idle.
        clock: nanoseconds.
        limit_s: no further step is begun after so many seconds.
    """
    started = clock()
    table = np.zeros((max(s.rows for s in steps), max(s.width for s in steps)), np.int32)
    costs, times = [], []
    for step in steps:
        costs.append(step.cost)
        times.append(_milliseconds(backend, step, table, clock, once_s=_SLOW_S if limit_s < math.inf else math.inf))
        if clock() - started > limit_s * 1e9:
            break
    model = fit(costs, times)
    errors = [abs(model.milliseconds(c) / t - 1) for c, t in zip(costs, times, strict=True)]
    shown = {
        "steps": len(times),
        "error_median": round(statistics.median(errors), 3),
        "error_max": round(max(errors), 3),
    }
    event(log, "steps timed", seconds=round((clock() - started) / 1e9, 2), **shown)
    return model


def _milliseconds(backend: EngineBackend, step: MadeUp, table: Ints, clock: Callable[[], int], once_s: float) -> float:
    """Time of a step in a row of such, median; of a large one, the second run. One longer than `once_s` is run once."""
    batch = step.batch(table)
    prompt, output = np.full(1, _TOKEN, np.int32), np.zeros(0, np.int32)
    for row in batch.rows.tolist():
        backend.open_row(row, _GREEDY, prompt, output)
    times = [_alone(backend, batch, clock)]
    if times[0] < once_s * 1e9:
        again = replace(batch, new_prefix=())
        large = step.cost.tokens >= _LARGE
        times = [_alone(backend, again, clock)] if large else _in_a_row(backend, again, clock)
    for row in batch.rows.tolist():
        backend.close_row(row)
    return max(statistics.median(times), 1) / 1e6


def _alone(backend: EngineBackend, batch: StepBatch, clock: Callable[[], int]) -> int:
    """Nanoseconds from launch to result."""
    began = clock()
    backend.launch(batch).result()
    return clock() - began


def _in_a_row(backend: EngineBackend, batch: StepBatch, clock: Callable[[], int]) -> list[int]:
    """Nanoseconds between the ends of steps, one always launched ahead."""
    pending, ends = backend.launch(batch), []
    for _ in range(_TIMED + 1):
        following = backend.launch(batch)
        pending.result()
        ends.append(clock())
        pending = following
    pending.result()
    return [after - before for before, after in itertools.pairwise(ends)]
