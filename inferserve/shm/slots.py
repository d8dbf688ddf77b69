"""`SlotTable`: the rows of `layout.py` over one segment, and views that let a role write only its own columns.

Scalars of a column are adjacent, so a step over hundreds of rows is one numpy operation.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferserve.errors import LayoutMismatch
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import MAGIC, VERSION, Column, Writer, columns, element_bytes
from inferserve.shm.segment import Segment

SEGMENT = "slots"
_HEADER_BYTES = 4096
_ALIGN = 4096

_params_decoder = msgspec.msgpack.Decoder(SamplingParams)
_params_encoder = msgspec.msgpack.Encoder()


def _round_up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def table_bytes(slots: int, max_req_total_len: int) -> int:
    """Size of the segment for `slots` rows (virtual: pages are taken on first touch)."""
    return _HEADER_BYTES + sum(_round_up(element_bytes(c) * slots) for c in columns(max_req_total_len))


class SlotTable:
    """Typed numpy columns over a segment: `table.view(Writer.HTTP).cancelled[index] = 1`."""

    def __init__(self, segment: Segment, slots: int, max_req_total_len: int) -> None:
        self.slots = slots
        self.max_req_total_len = max_req_total_len
        self._segment = segment
        self._header = np.frombuffer(segment.mmap, dtype=np.int64, count=4)
        self._columns: dict[str, tuple[Column, NDArray[Any]]] = {}
        offset = _HEADER_BYTES
        for column in columns(max_req_total_len):
            count = slots * column.stride
            array = np.frombuffer(segment.mmap, dtype=column.dtype, count=count, offset=offset)
            shaped = array if column.stride == 1 else array.reshape(slots, column.stride)
            self._columns[column.name] = (column, shaped)
            offset += _round_up(element_bytes(column) * slots)

    @classmethod
    def create(cls, slots: int, max_req_total_len: int) -> tuple[SlotTable, Segment]:
        """For the launcher: a zeroed table and the segment to pass on."""
        segment = Segment.create(SEGMENT, table_bytes(slots, max_req_total_len))
        table = cls(segment, slots, max_req_total_len)
        table._header[:] = (MAGIC, VERSION, slots, max_req_total_len)
        return table, segment

    @classmethod
    def attach(cls, fds: dict[str, int], slots: int, max_req_total_len: int) -> SlotTable:
        """For children. Raises SegmentMissing or LayoutMismatch."""
        segment = Segment.attach(fds, SEGMENT, table_bytes(slots, max_req_total_len))
        table = cls(segment, slots, max_req_total_len)
        if table._header.tolist() != [MAGIC, VERSION, slots, max_req_total_len]:
            raise LayoutMismatch(f"slot table header {table._header.tolist()}")
        return table

    def view(self, writer: Writer) -> SlotView:
        """All columns, of which only `writer`'s are writable."""
        return SlotView(self._columns, writer)


class SlotView:
    """Columns as numpy arrays; those of other writers are read-only. Attribute names are in `layout.columns`."""

    generation: NDArray[np.uint32]
    in_use: NDArray[np.uint8]
    cancelled: NDArray[np.uint8]
    delivered_tokens: NDArray[np.int32]
    prompt_len: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    ignore_eos: NDArray[np.uint8]
    arrival_ns: NDArray[np.int64]
    params_len: NDArray[np.int32]
    params: NDArray[np.uint8]
    prompt_ids: NDArray[np.int32]
    router_done: NDArray[np.uint32]
    admitted: NDArray[np.uint32]
    admit_ns: NDArray[np.int64]
    engine_done: NDArray[np.uint32]
    visible: NDArray[np.int32]
    cached_tokens: NDArray[np.int32]
    prefill_start_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    last_token_ns: NDArray[np.int64]
    preemptions: NDArray[np.int32]
    finish: NDArray[np.uint8]
    output_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    detok_done: NDArray[np.uint32]

    def __init__(self, source: dict[str, tuple[Column, NDArray[Any]]], writer: Writer) -> None:
        for name, (column, array) in source.items():
            view = array.view()
            view.flags.writeable = column.writer == writer
            setattr(self, name, view)

    def sampling_params(self, index: int) -> SamplingParams:
        """Decode the params column of a row."""
        return _params_decoder.decode(self.params[index, : int(self.params_len[index])].tobytes())

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Prompt ids of a row, int32 [prompt_len]; a view, valid while the row is."""
        return self.prompt_ids[index, : int(self.prompt_len[index])]


def encode_params(params: SamplingParams) -> bytes:
    """What goes into the `params` column."""
    return _params_encoder.encode(params)
