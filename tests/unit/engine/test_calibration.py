"""Calibration over a pretended device: what it runs is well formed, bounded, and tells the costs apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from inferserve.engine.calibration import MadeUp, calibrate, calibrated, made_up_steps
from inferserve.engine.cost_model import StepCost, chunk_pairs
from inferserve.engine.pacing import cost_of
from inferserve.engine.step import BackendFacts, Ints, StepBatch, StepResult
from inferserve.engine.warmup import Extent
from inferserve.protocol.sampling import SamplingParams
from tests.fakes.engine import engine_config
from tests.unit.engine.test_cost_model import h200

EXTENT = Extent(rows=256, length=16384, tokens=8448, chunk=4096)
POOL = 600_000


@dataclass
class Device:
    """A device that takes as long as an H200, `slow` times as long, and works while the host goes on."""

    slow: float = 1.0
    now: int = 0
    free: int = 0
    open: set[int] = field(default_factory=set)
    batches: list[StepBatch] = field(default_factory=list)

    def clock(self) -> int:
        return self.now

    def start(self) -> BackendFacts:
        return BackendFacts(POOL, {})

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        assert params.greedy and len(prompt) and not len(output) and row not in self.open
        self.open.add(row)

    def close_row(self, row: int) -> None:
        self.open.remove(row)

    def launch(self, batch: StepBatch) -> Running:
        assert set(batch.rows.tolist()) == self.open
        self.batches.append(batch)
        chunks_from = batch.num_decode
        self.now += 200_000
        self.free = max(self.free, self.now) + int(self.slow * h200(cost_of(batch, chunks_from)) * 1e6)
        return Running(self, self.free, len(batch.sample))


@dataclass(frozen=True)
class Running:
    device: Device
    ends: int
    results: int

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.ends)
        n = self.results
        return StepResult(np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.bool_), {})


def test_predictions_after_calibration() -> None:
    device = Device()
    model = calibrate(device, made_up_steps(EXTENT, POOL), device.clock)
    assert not device.open
    for step in (
        StepCost(64, 64 * 1152, 0, 64),
        StepCost(320, 64 * 1152, chunk_pairs(512, 256), 64),
        StepCost(1280, 256 * 1152, chunk_pairs(0, 1024), 256),
        StepCost(4096, 0, chunk_pairs(4096, 4096), 1),
    ):
        assert model.milliseconds(step) == pytest.approx(h200(step), rel=0.15)
    assert device.now < 4e9


@pytest.mark.parametrize("slow", [10.0, 100.0, 1000.0])
def test_it_ends_soon_however_slow_the_device(slow: float) -> None:
    device = Device(slow=slow)
    model = calibrate(device, made_up_steps(EXTENT, POOL), device.clock)
    longest = max(h200(cost_of(b, b.num_decode)) for b in device.batches) * slow * 1e6
    assert device.now <= 4e9 + 6 * longest, "the step that was begun is the last one"
    step = StepCost(64, 64 * 1024, 0, 64)
    assert model.milliseconds(step) == pytest.approx(slow * h200(step), rel=0.5)


@pytest.mark.parametrize(
    ("extent", "pool"),
    [
        (EXTENT, POOL),
        (EXTENT, 20_000),
        (Extent(rows=1, length=64, tokens=64, chunk=64), 64),
        (Extent(rows=8, length=512, tokens=512, chunk=256), 4096),
        (Extent(rows=2, length=8, tokens=8, chunk=8), 8),
    ],
)
def test_steps_are_possible_ones(extent: Extent, pool: int) -> None:
    steps = made_up_steps(extent, pool)
    assert steps, "something must be timed"
    for step in steps:
        table = np.full((extent.rows, extent.length), -1, np.int32)
        batch = step.batch(table)
        assert len(batch.token_ids) == batch.query_len.sum() == len(batch.positions) <= extent.tokens
        assert len(batch.rows) <= extent.rows and (batch.query_len <= max(extent.chunk, 1)).all()
        assert (batch.kv_len <= extent.length).all()
        used = np.concatenate([table[row, :n] for row, n in zip(batch.rows, batch.kv_len, strict=True)])
        assert len(set(used.tolist())) == len(used), "two contexts share a place"
        assert used.min() >= 0 and used.max() < pool
        owner = np.repeat(batch.rows, batch.query_len)
        assert (table[owner, batch.positions] == batch.kv_index).all()
        assert (batch.query_len[: batch.num_decode] == 1).all()
        assert batch.new_prefix == tuple(
            (int(r), int(n - q)) for r, n, q in zip(batch.rows, batch.kv_len, batch.query_len, strict=True) if n > q
        )
        assert cost_of(batch, batch.num_decode) == step.cost
    assert MadeUp(1, min(1024, extent.length)) in steps


def test_a_failing_step_means_no_model(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(rows=8, max_len=512, chunk=256, batch=512)
    device = Device()
    assert calibrated(config, device, POOL) is None and not device.batches, "no flag asks for times"
    asking = replace(config, schedule=replace(config.schedule, target_step_ms=5.0))
    assert calibrated(asking, device, POOL) is not None

    def fail(batch: StepBatch) -> Running:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(device, "launch", fail)
    assert calibrated(asking, device, POOL) is None
    assert "cannot be timed" in caplog.text
