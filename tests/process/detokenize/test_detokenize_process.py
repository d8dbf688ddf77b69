"""The real detokenizer process; the test plays http, engine, router and launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inferserve.config.schema import HttpPart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.process import EXIT_CONFIG
from inferserve.protocol.messages import (
    Fault,
    Finish,
    FinishedRow,
    KvCounters,
    SlotRef,
    StepReport,
    StopMatched,
    TextItem,
    TextReady,
)
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import encode_params
from inferserve.tokenize.load import load_tokenizer
from tests.fakes.neighbours import Neighbours
from tests.fakes.tiny_tokenizers import MAKERS

_KV = KvCounters(100, 0, 0, 100, 0, 0)


def _config(folder: Path) -> ServerConfig:
    return ServerConfig(
        model=ModelPart(max_req_total_len=128),
        schedule=SchedulePart(running_max_req_size=4, max_queued_requests=4),
        http=HttpPart(httpserver_workers=2),
        facts=ModelFacts(folder=str(folder), vocab_size=1000),
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Neighbours]:
    with Neighbours("detokenize", _config(MAKERS["byte_level"](tmp_path))) as world:
        world.wait_ready()
        yield world


def _take(world: Neighbours, slot: int, **params: object) -> int:
    http = world.view(Writer.HTTP)
    raw = encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    http.params[slot, : len(raw)] = np.frombuffer(raw, np.uint8)
    http.params_len[slot] = len(raw)
    http.generation[slot] += 1
    return int(http.generation[slot])


def _report(world: Neighbours, slots: list[int], token: int, *finished: FinishedRow) -> StepReport:
    engine = world.view(Writer.ENGINE)
    index = np.array(slots, np.int32)
    engine.output_ids[index, engine.visible[index]] = token
    engine.visible[index] += 1
    generations = engine.generation[index]
    return StepReport(1, index.tobytes(), generations.tobytes(), engine.visible[index].tobytes(), _KV, finished)


def test_texts_reach_the_owning_workers(world: Neighbours) -> None:
    tokenizer = load_tokenizer(world.config)
    ids = tokenizer.encode("Straße ☃")
    mine, other = _take(world, 0), _take(world, 8)
    for token in ids:
        world.send(_report(world, [0, 8], token))
    world.send(StepReport(9, b"", b"", b"", _KV, (FinishedRow(0, mine, Finish.LENGTH),)))
    for worker, slot, count in (("http-0", 0, len(ids) + 1), ("http-1", 8, len(ids))):
        items = [i for m in world.receive_all(worker, TextReady, count) for i in m.items]
        assert {i.index for i in items} == {slot}
        assert "".join(i.text for i in items) == "Straße ☃"
    assert world.view(Writer.HTTP).detok_done[[0, 8]].tolist() == [mine, 0]
    assert other == 1


def test_stop_string(world: Neighbours) -> None:
    tokenizer = load_tokenizer(world.config)
    generation = _take(world, 3, stop=("xyx",))
    for char in "axyx":
        (token,) = tokenizer.encode(char)
        world.send(_report(world, [3], token))
    assert world.receive("router", StopMatched).slots == (SlotRef(3, generation),)
    items = [i for m in world.receive_all("http-0", TextReady, 4) for i in m.items]
    assert items[-1] == TextItem(3, generation, 3, 4, "", Finish.STOP, "xyx")
    assert "".join(i.text for i in items) == "a"
    world.send(_report(world, [3], token, FinishedRow(3, generation, Finish.STOP)))
    assert world.quiet("http-0", TextReady)
    assert world.view(Writer.HTTP).detok_done[3] == generation


def test_bad_frames_are_dropped(world: Neighbours) -> None:
    """Garbage in the inbox costs a log line, nothing else."""
    world._outbox.send_frame(b"\xc1garbage")
    _take(world, 0)
    world.send(_report(world, [0], load_tokenizer(world.config).encode("A")[0]))
    assert world.receive("http-0", TextReady).items[0].text == "A"
    assert "dropped a frame" in world.log()


def test_stops_when_told(world: Neighbours) -> None:
    assert world.stop() == 0


def test_foreign_tokenizer_is_a_config_fault(tmp_path: Path) -> None:
    """F-41: more tokens than the model has embeddings."""
    config = _config(MAKERS["byte_level"](tmp_path))
    with Neighbours("detokenize", replace(config, facts=replace(config.facts, vocab_size=400))) as world:
        fault = world.wait_control()
        assert isinstance(fault, Fault) and fault.config and "400 embeddings" in fault.reason
        assert world.process.wait(10) == EXIT_CONFIG


def test_missing_tokenizer_is_a_config_fault(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with Neighbours("detokenize", _config(tmp_path)) as world:
        fault = world.wait_control()
        assert isinstance(fault, Fault) and fault.config and "tokenizer.json" in fault.reason
        assert world.process.wait(10) == EXIT_CONFIG
