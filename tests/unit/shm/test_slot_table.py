"""The slot table: what is written through one view is seen through the others, rows do not touch, wrong layouts are refused."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferserve.errors import LayoutMismatch, SegmentMissing
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Column, Writer, columns
from inferserve.shm.segment import Segment
from inferserve.shm.slots import SEGMENT, SlotTable, encode_params, table_bytes

SLOTS, MAX_LEN = 5, 16
SMALL = [c for c in columns(MAX_LEN) if c.name != "params"]


class SlotsMachine(RuleBasedStateMachine):
    """Random writes by the right roles, read back by all roles and by a second process's mapping of the segment."""

    @initialize()
    def create(self) -> None:
        self.table, self.segment = SlotTable.create(SLOTS, MAX_LEN)
        self.other = SlotTable.attach({SEGMENT: self.segment.fd}, SLOTS, MAX_LEN)
        self.views = {writer: self.table.view(writer) for writer in Writer}
        self.model = {c.name: np.zeros((SLOTS, c.stride), dtype=c.dtype) for c in SMALL}

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            os.close(self.segment.fd)

    @rule(column=st.sampled_from(SMALL), slot=st.integers(0, SLOTS - 1), data=st.data())
    def write(self, column: Column, slot: int, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, column.stride - 1))
        value = data.draw(st.integers(0, 200))
        array = getattr(self.views[column.writer], column.name)
        if column.stride == 1:
            array[slot] = value
        else:
            array[slot, at] = value
        self.model[column.name][slot, at] = value

    @precondition(lambda self: hasattr(self, "views"))
    @rule(column=st.sampled_from(SMALL), writer=st.sampled_from(list(Writer)), slot=st.integers(0, SLOTS - 1))
    def write_as_another_role(self, column: Column, writer: Writer, slot: int) -> None:
        array = getattr(self.views[writer], column.name)
        if writer is column.writer:
            return
        with pytest.raises(ValueError, match="read-only"):
            array[slot] = 7
        with pytest.raises(ValueError, match="read-only"):
            np.copyto(array, 7)

    @invariant()
    def all_see_the_same(self) -> None:
        if not hasattr(self, "views"):
            return
        for view in [*self.views.values(), self.other.view(Writer.ROUTER)]:
            for column in SMALL:
                seen = getattr(view, column.name).reshape(SLOTS, column.stride)
                np.testing.assert_array_equal(seen, self.model[column.name], err_msg=column.name)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_columns_do_not_overlap_and_fill_their_rows() -> None:
    table, segment = SlotTable.create(SLOTS, MAX_LEN)
    header = bytes(segment.mmap[:32])
    for n, column in enumerate(columns(MAX_LEN), 1):
        getattr(table.view(column.writer), column.name)[...] = n
    for n, column in enumerate(columns(MAX_LEN), 1):
        assert (getattr(table.view(Writer.HTTP), column.name) == n).all(), column.name
    assert bytes(segment.mmap[:32]) == header


def test_a_new_table_is_zero() -> None:
    table, _ = SlotTable.create(SLOTS, MAX_LEN)
    view = table.view(Writer.ENGINE)
    assert not any(np.any(getattr(view, c.name)) for c in columns(MAX_LEN))


def test_prompt_and_params_of_a_row() -> None:
    table, _ = SlotTable.create(SLOTS, MAX_LEN)
    http, engine = table.view(Writer.HTTP), table.view(Writer.ENGINE)
    params = SamplingParams(temperature=0.5, stop=("é\n", "x"), logit_bias={3: -1.5}, seed=2**63 - 1)
    data = encode_params(params)
    http.params[2, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    http.params_len[2], http.prompt_len[2] = len(data), 3
    http.prompt_ids[2, :3] = [7, 8, 9]
    assert engine.sampling_params(2) == params
    assert engine.prompt(2).tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="read-only"):
        engine.prompt(2)[0] = 1


def test_long_lists_of_parameters_fit_their_column() -> None:
    """Ids and biases at their limits, 8 of 32 stop strings of the widest characters; http refuses what is larger."""
    params = SamplingParams(
        stop=tuple("\U0010ffff" * 1024 for _ in range(8)),
        stop_token_ids=tuple(range(100_000, 100_256)),
        logit_bias={100_000 + i: -99.9 for i in range(1024)},
        seed=2**63 - 1,
    ).validate(vocab_size=200_000)
    assert len(encode_params(params)) <= next(c.stride for c in columns(MAX_LEN) if c.name == "params")


@pytest.mark.parametrize(("slots", "max_len"), [(SLOTS + 400, MAX_LEN), (SLOTS, MAX_LEN * 4096)])
def test_another_size_is_refused(slots: int, max_len: int) -> None:
    _, segment = SlotTable.create(SLOTS, MAX_LEN)
    with pytest.raises(LayoutMismatch, match="bytes"):
        SlotTable.attach({SEGMENT: segment.fd}, slots, max_len)


def test_another_shape_of_the_same_size_is_refused() -> None:
    assert table_bytes(SLOTS, MAX_LEN) == table_bytes(SLOTS, MAX_LEN + 1), "rounding to pages hides the difference"
    _, segment = SlotTable.create(SLOTS, MAX_LEN)
    with pytest.raises(LayoutMismatch, match="header"):
        SlotTable.attach({SEGMENT: segment.fd}, SLOTS, MAX_LEN + 1)


@pytest.mark.parametrize("field", range(4))
def test_a_foreign_header_is_refused(field: int) -> None:
    _, segment = SlotTable.create(SLOTS, MAX_LEN)
    np.frombuffer(segment.mmap, dtype=np.int64, count=4)[field] += 1
    with pytest.raises(LayoutMismatch, match="header"):
        SlotTable.attach({SEGMENT: segment.fd}, SLOTS, MAX_LEN)


def test_a_segment_that_was_not_passed_is_named() -> None:
    with pytest.raises(SegmentMissing, match="slots"):
        SlotTable.attach({}, SLOTS, MAX_LEN)


def test_segments_neither_grow_nor_shrink() -> None:
    segment = Segment.create("test", 8192)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    assert os.fstat(segment.fd).st_size == 8192
    assert os.pwrite(segment.fd, b"x", 8191) == 1
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"xx", 8192)


def test_segments_have_no_name_and_take_pages_on_touch() -> None:
    segment = Segment.create("nameless-test", 1 << 36)
    assert not list(Path("/dev/shm").glob("*nameless-test*"))
    assert os.fstat(segment.fd).st_blocks == 0
    segment.mmap[12345] = 1
    assert 0 < os.fstat(segment.fd).st_blocks * 512 <= 2 * max(mmap.PAGESIZE, 1 << 21)
    assert not os.get_inheritable(segment.fd)
