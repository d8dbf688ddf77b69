"""`Detokenizer.handle`: reports and a slot table in, items out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferserve.config.schema import ModelFacts, ServerConfig
from inferserve.detokenize.loop import Detokenizer
from inferserve.errors import PeerGone
from inferserve.protocol.messages import (
    Finish,
    FinishedRow,
    KvCounters,
    SlotRef,
    StepReport,
    StopMatched,
    TextItem,
    TextReady,
    TopLogprobs,
)
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, encode_params
from inferserve.tokenize.load import Tokenizer, load_tokenizer
from tests.fakes.tiny_tokenizers import MAKERS

_KV = KvCounters(100, 0, 0, 100, 0, 0)
_PER_WORKER = 4


class _Sent(list[Any]):
    """An outbox that keeps what it is given."""

    full = False

    def send(self, message: Any) -> None:
        if self.full:
            raise PeerGone("nobody")
        self.append(message)


class World:
    """Two http workers, a router and an engine played by the test."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.table, _ = SlotTable.create(2 * _PER_WORKER, 64)
        self.http, self.engine = self.table.view(Writer.HTTP), self.table.view(Writer.ENGINE)
        self.workers, self.router = [_Sent(), _Sent()], _Sent()
        self.view = self.table.view(Writer.DETOKENIZE)
        self.subject = Detokenizer(self.view, tokenizer, _PER_WORKER, self.workers, self.router)

    def take(self, slot: int, **params: Any) -> int:
        """http takes a slot; its generation."""
        raw = encode_params(SamplingParams(**params))
        self.http.generation[slot] += 1
        self.http.cancelled[slot] = 0
        self.http.params[slot, : len(raw)] = np.frombuffer(raw, np.uint8)
        self.http.params_len[slot] = len(raw)
        self.engine.visible[slot] = 0
        return int(self.http.generation[slot])

    def produce(self, *slots: int, ids: list[int]) -> StepReport:
        """The engine writes the same ids to all of these slots; its report."""
        for slot in slots:
            at = int(self.engine.visible[slot])
            self.engine.output_ids[slot, at : at + len(ids)] = ids
            self.engine.visible[slot] = at + len(ids)
        index = np.array(slots, np.int32)
        return StepReport(
            1, index.tobytes(), self.http.generation[index].tobytes(), self.engine.visible[index].tobytes(), _KV
        )

    def step(self, *slots: int, ids: list[int], **extra: Any) -> list[TextItem]:
        report = self.produce(*slots, ids=ids)
        return self.handle(StepReport(1, report.slots, report.generations, report.visible, _KV, **extra))

    def handle(self, report: StepReport) -> list[TextItem]:
        """What worker 0 is sent for a report: one message at most."""
        before = len(self.workers[0])
        self.subject.handle(report)
        new = self.workers[0][before:]
        assert len(new) <= 1
        return list(new[0].items) if new else []

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = MAKERS["byte_level"](tmp_path_factory.mktemp("byte_level"))
    return load_tokenizer(ServerConfig(facts=ModelFacts(folder=str(folder))))


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


def _ended(slot: int, generation: int, finish: Finish, **more: Any) -> dict[str, Any]:
    return {"finished": (FinishedRow(slot, generation, finish, **more),)}


def test_deltas_of_a_row(world: World) -> None:
    generation = world.take(0)
    ids = world.ids("The quick ☃")
    items = [item for i in ids for item in world.step(0, ids=[i])]
    items += world.handle(StepReport(2, b"", b"", b"", _KV, **_ended(0, generation, Finish.LENGTH)))
    assert "".join(i.text for i in items) == "The quick ☃"
    assert [(i.from_token, i.to_token) for i in items[:-1]] == [(n, n + 1) for n in range(len(ids))]
    assert items[-1] == TextItem(0, generation, len(ids), len(ids), "", Finish.LENGTH)
    assert world.view.detok_done[0] == generation
    assert world.subject.open_rows == 0


def test_one_message_a_worker(world: World) -> None:
    for slot in (0, 3, 4, 7):
        world.take(slot)
    world.step(0, 3, 4, 7, ids=world.ids("The"))
    assert [[i.index for m in w for i in m.items] for w in world.workers] == [[0, 3], [4, 7]]
    assert all(len(w) == 1 and isinstance(w[0], TextReady) for w in world.workers)


def test_stale_reports_are_ignored(world: World) -> None:
    generation = world.take(0)
    stale = world.produce(0, ids=world.ids("old"))
    world.take(0)
    assert world.handle(stale) == []
    assert world.handle(StepReport(2, b"", b"", b"", _KV, **_ended(0, generation, Finish.LENGTH))) == []
    assert world.view.detok_done[0] == 0
    assert [i.text for i in world.step(0, ids=world.ids("new"))] == ["new"]


def test_reused_slot_starts_a_new_text(world: World) -> None:
    """The next generation owes nothing to the previous one, even if its end was never seen."""
    world.take(0)
    world.step(0, ids=world.ids("☃")[:1])
    world.take(0, stop=("x",))
    assert [i.text for i in world.step(0, ids=world.ids("abcx"))] == ["abc"]


def test_late_reports_carry_their_own_tokens(world: World) -> None:
    """Two reports that lie in the inbox together: each item holds the tokens of its step."""
    generation = world.take(0)
    first, second = world.produce(0, ids=world.ids("A")), world.produce(0, ids=world.ids("BC"))
    assert world.handle(first) == [TextItem(0, generation, 0, 1, "A")]
    (item,) = world.handle(second)
    assert (item.from_token, item.text) == (1, "BC")


def test_first_mention_of_a_row_that_ran_already(world: World) -> None:
    """A detokenizer that was restarted rebuilds the text from the ids."""
    world.take(0)
    world.produce(0, ids=world.ids("The quick"))
    (item,) = world.step(0, ids=world.ids(" brown"))
    assert (item.from_token, item.text) == (0, "The quick brown")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_e01_stop_across_tokens(world: World, size: int) -> None:
    generation = world.take(0, stop=("DEFGHIJ",))
    ids = [world.ids(c)[0] for c in "ABCDEFGHIJKL"]
    items = [i for at in range(0, len(ids), size) for i in world.step(0, ids=ids[at : at + size])]
    assert "".join(i.text for i in items) == "ABC"
    last = items[-1]
    assert (last.finish, last.stop_reason, last.to_token) == (Finish.STOP, "DEFGHIJ", 10)
    assert world.router == [StopMatched((SlotRef(0, generation),))]
    overrun = world.step(0, ids=ids[:1], **_ended(0, generation, Finish.STOP))
    assert overrun == [] and world.view.detok_done[0] == generation


def test_e02_held_tail_is_flushed_at_the_end(world: World) -> None:
    generation = world.take(0, stop=("EFX",))
    ids = [world.ids(c)[0] for c in "ABCDEF"]
    items = [i for t in ids[:-1] for i in world.step(0, ids=[t])]
    items += world.step(0, ids=ids[-1:], **_ended(0, generation, Finish.LENGTH))
    assert [i.text for i in items] == ["A", "B", "C", "D", "", "EF"]
    assert (items[-1].finish, items[-1].stop_reason, world.router) == (Finish.LENGTH, None, [])


def test_include_stop_and_min_tokens(world: World) -> None:
    world.take(0, stop=("B",), include_stop=True, min_tokens=2)
    items = [i for c in "ABAB" for i in world.step(0, ids=world.ids(c))]
    assert [i.text for i in items] == ["A", "B", "A", "B"]
    assert [i.finish for i in items] == [0, 0, 0, Finish.STOP]


def test_stop_string_in_the_very_last_token(world: World) -> None:
    """max_tokens and stop string at once: the text is cut and the reason is the string; nothing to tell the router."""
    generation = world.take(0, stop=("b",))
    (item,) = world.step(0, ids=world.ids("ab"), **_ended(0, generation, Finish.LENGTH))
    assert (item.text, item.finish, item.stop_reason) == ("a", Finish.STOP, "b")
    assert world.router == []


def test_cut_character_becomes_a_replacement(world: World) -> None:
    generation = world.take(0)
    ids = world.ids("a☃")[:-1]
    (item,) = world.step(0, ids=ids, **_ended(0, generation, Finish.LENGTH))
    assert item.text == world.tokenizer.decode(ids) == "a\ufffd"


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({}, "hi", None),
        ({"skip_special_tokens": False}, "hi", None),
        ({"skip_special_tokens": False, "include_stop": True}, "hi<|im_end|>", None),
        ({"stop_token_ids": (2,)}, "hi", 2),
    ],
)
def test_stop_tokens(world: World, params: dict[str, Any], text: str, reason: int | None) -> None:
    generation = world.take(0, **params)
    ids = world.ids("hi<|im_end|>")
    (item,) = world.step(0, ids=ids, **_ended(0, generation, Finish.STOP, stop_token=2))
    assert (item.text, item.stop_reason, item.to_token) == (text, reason, len(ids))


def test_plain_stop_token_is_hidden_too(world: World) -> None:
    (letter,) = world.ids("x")
    generation = world.take(0, stop_token_ids=(letter,))
    (item,) = world.step(0, ids=[*world.ids("hi"), letter], **_ended(0, generation, Finish.STOP, stop_token=letter))
    assert (item.text, item.stop_reason) == ("hi", letter)


def test_special_tokens_in_the_middle(world: World) -> None:
    world.take(0)
    world.take(1, skip_special_tokens=False)
    items = world.step(0, 1, ids=world.ids("a<|im_end|>b"))
    assert [i.text for i in items] == ["ab", "a<|im_end|>b"]


def test_abort(world: World) -> None:
    """A cancelled row gets no more text, but its last item."""
    generation = world.take(0)
    world.step(0, ids=world.ids("a"))
    world.http.cancelled[0] = 1
    assert world.step(0, ids=world.ids("b")) == []
    (item,) = world.handle(StepReport(2, b"", b"", b"", _KV, **_ended(0, generation, Finish.ABORT)))
    assert (item.finish, item.text) == (Finish.ABORT, "")
    assert world.view.detok_done[0] == generation


def test_row_that_ended_before_its_first_token(world: World) -> None:
    generation = world.take(0)
    (item,) = world.handle(StepReport(1, b"", b"", b"", _KV, **_ended(0, generation, Finish.ERROR, error="NaN")))
    assert item == TextItem(0, generation, 0, 0, "", Finish.ERROR, error="NaN")


def test_tops_go_with_their_tokens(world: World) -> None:
    generation = world.take(0, logprobs=1)
    other = world.take(1)
    tops = tuple(TopLogprobs(0, generation, position, (5,), (-0.5,)) for position in range(2))
    first, second = world.step(0, 1, ids=[*world.ids("A"), *world.ids("x")], tops=tops)
    assert (first.tops, second.tops, other) == (tops, (), 1)


def test_fault_of_a_row_is_its_own(world: World) -> None:
    """Unreadable parameters (W-65): an ERROR item, the router stops the row, the neighbour gets its text."""
    generation = world.take(0)
    world.http.params[0, :4] = 255
    world.take(1)
    first, second = world.step(0, 1, ids=world.ids("AB"))
    assert (first.finish, first.to_token, second.text) == (Finish.ERROR, 0, "AB")
    assert "detokenizer" in first.error
    assert world.router == [StopMatched((SlotRef(0, generation),))]
    assert [i.index for i in world.step(0, 1, ids=world.ids("C"))] == [1]
    assert world.handle(StepReport(2, b"", b"", b"", _KV, **_ended(0, generation, Finish.STOP))) == []
    assert world.view.detok_done[0] == generation


def test_fault_in_the_last_step(world: World) -> None:
    generation = world.take(0)
    world.http.params[0, :4] = 255
    (item,) = world.step(0, ids=world.ids("AB"), **_ended(0, generation, Finish.LENGTH))
    assert (item.finish, world.view.detok_done[0], world.subject.open_rows) == (Finish.ERROR, generation, 0)


def test_worker_that_takes_no_messages(world: World) -> None:
    """A full queue to one worker is not the other's business."""
    world.take(0)
    world.take(4)
    world.workers[0].full = True
    world.step(0, 4, ids=world.ids("A"))
    assert len(world.workers[1]) == 1
