"""The real engine process with the fake backend; the test plays launcher, http, router and detokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inferserve.config.schema import ServerConfig
from inferserve.protocol.messages import Admit, Commands, EngineReady, Fault, Finish, SlotRef, StepReport
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import encode_params
from tests.fakes import tiny_tokenizers
from tests.fakes.engine import engine_config
from tests.fakes.neighbours import Neighbours

KV_TOKENS = 2048


def configuration(folder: Path, depth: int = 0, step_ms: float = 0.0) -> ServerConfig:
    base = engine_config(depth=depth, max_len=256, chunk=32, batch=64)
    engine = replace(base.engine, fake_kv_tokens=KV_TOKENS, fake_step_ms=step_ms, debug_checks=True)
    return replace(base, engine=engine, facts=replace(base.facts, folder=str(folder), vocab_size=500))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def world(request: pytest.FixtureRequest, folder: Path) -> Iterator[Neighbours]:
    with Neighbours("engine-0", configuration(folder, request.param, step_ms=1.0)) as world:
        assert world.wait_ready().facts["kv_tokens"] == KV_TOKENS
        assert world.receive("router", EngineReady) == EngineReady(KV_TOKENS, 8, 64)
        yield world


def fill(world: Neighbours, index: int, prompt: list[int], **params: object) -> SlotRef:
    http = world.view(Writer.HTTP)
    http.generation[index] += 1
    http.in_use[index], http.cancelled[index] = 1, 0
    http.prompt_len[index] = len(prompt)
    http.prompt_ids[index, : len(prompt)] = prompt
    data = encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    http.params_len[index] = len(data)
    http.params[index, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    return SlotRef(index, int(http.generation[index]))


def until_finished(world: Neighbours, at: str, count: int) -> list[StepReport]:
    """Reports at `at` up to the one in which `count` rows have ended."""
    reports: list[StepReport] = []
    while sum(len(r.finished) for r in reports) < count:
        reports.append(world.receive(at, StepReport))
    return reports


def test_a_request_from_commands_to_reports(world: Neighbours) -> None:
    ref = fill(world, 3, list(range(10, 60)), max_tokens=9, seed=5)
    world.send(Commands(1, (Admit(*_fields(ref)),)))
    at_detokenize = until_finished(world, "detokenize", 1)
    at_router = until_finished(world, "router", 1)
    visible = [np.frombuffer(r.visible, dtype=np.int32).tolist() for r in at_detokenize]
    assert [v for v in visible if v] == [[n] for n in range(1, 10)]
    assert [r for r in at_router if r.slots or r.finished] == at_detokenize
    assert sum(r.prefill_tokens for r in at_router) == 50
    last = at_router[-1]
    assert last.finished[0].finish is not None and last.finished[0].finish == Finish.LENGTH
    assert (last.kv.used, last.kv.running) == (0, 0) and last.kv.cached == 58
    slots = world.view(Writer.HTTP)
    assert slots.engine_done[3] == ref.generation
    assert slots.visible[3] == 9 and (slots.output_ids[3, :9] > 0).all()
    assert 0 < slots.prefill_start_ns[3] <= slots.first_token_ns[3] <= slots.last_token_ns[3] <= time.monotonic_ns()


def _fields(ref: SlotRef) -> tuple[int, int]:
    return ref.index, ref.generation


def test_aborts_and_stops_of_running_rows(world: Neighbours) -> None:
    refs = [fill(world, i, [20 + i, 30], max_tokens=200, seed=i) for i in range(8)]
    world.send(Commands(0, tuple(Admit(*_fields(r)) for r in refs)))
    while len(np.frombuffer(world.receive("router", StepReport).slots, dtype=np.int32)) < 8:
        pass
    world.send(Commands(1, abort=tuple(refs[:4]), stop=tuple(refs[4:])))
    reports = until_finished(world, "router", 8)
    ends = {f.index: f.finish for r in reports for f in r.finished}
    assert ends == {**dict.fromkeys(range(4), Finish.ABORT), **dict.fromkeys(range(4, 8), Finish.STOP)}
    while reports[-1].kv.used:
        reports.append(world.receive("router", StepReport))
    assert (world.view(Writer.HTTP).engine_done[:8] == 1).all()
    assert world.quiet("router", StepReport, 0.1)


def test_slots_are_used_again(world: Neighbours) -> None:
    for seq in range(5):
        ref = fill(world, 0, [5, 6, 7], max_tokens=3, seed=seq)
        world.send(Commands(seq, (Admit(*_fields(ref)),)))
        (end,) = until_finished(world, "router", 1)[-1].finished
        assert (end.index, end.generation) == (0, seq + 1)


def test_an_idle_engine_uses_no_cpu(world: Neighbours) -> None:
    ref = fill(world, 0, [5, 6, 7], max_tokens=3)
    world.send(Commands(0, (Admit(*_fields(ref)),)))
    until_finished(world, "router", 1)
    before = _cpu_ticks(world.process.pid)
    time.sleep(0.5)
    assert _cpu_ticks(world.process.pid) - before <= 1
    assert world.quiet("router", StepReport, 0.05)


def _cpu_ticks(pid: int) -> int:
    """User plus system time in clock ticks (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_gap_in_commands_is_a_fault(folder: Path) -> None:
    with Neighbours("engine-0", configuration(folder)) as world:
        world.wait_ready()
        world.send(Commands(4))
        world.send(Commands(6))
        fault = world.wait_control()
        assert isinstance(fault, Fault) and not fault.config
        assert "commands 6 came after 4" in fault.reason
        assert world.process.wait(10) == 70


def test_stop_ends_it_while_it_runs(folder: Path) -> None:
    with Neighbours("engine-0", configuration(folder, step_ms=20.0)) as world:
        world.wait_ready()
        ref = fill(world, 0, [5, 6, 7], max_tokens=200)
        world.send(Commands(0, (Admit(*_fields(ref)),)))
        world.receive("router", StepReport)
        started = time.monotonic()
        assert world.stop() == 0
        assert time.monotonic() - started < 2


def test_the_fake_engine_loads_no_torch(folder: Path) -> None:
    with Neighbours("engine-0", configuration(folder)) as world:
        world.wait_ready()
        maps = Path(f"/proc/{world.process.pid}/maps").read_text()
        assert "libtorch" not in maps and "libtriton" not in maps


def test_a_tokenizer_without_printable_tokens_is_a_configuration_error(tmp_path: Path, folder: Path) -> None:
    config = configuration(folder)
    with Neighbours("engine-0", replace(config, facts=replace(config.facts, vocab_size=2))) as world:
        fault = world.wait_control()
        assert isinstance(fault, Fault) and fault.config
        assert "printable" in fault.reason
        assert world.process.wait(10) == 2
