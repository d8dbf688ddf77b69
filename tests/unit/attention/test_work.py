"""`WorkLists`: every query meets every key it may see exactly once, in lists that fit their buckets."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.attention.base import Bucket, HostRows, Ints
from inferserve.attention.work import LEAST_STRETCH, SHORT_CHUNK, Capacity, WorkLists, WorkShape
from inferserve.kernels.paged_kv import HEADER, ITEM

SHAPES = [
    WorkShape(8, 4, 128, 264),
    WorkShape(8, 4, 128, 264, deterministic=True),
    WorkShape(3, 3, 64, 264),
    WorkShape(1, 20, 32, 16),
    WorkShape(16, 1, 128, 4),
]
LENGTHS = st.integers(1, 300) | st.integers(1, 40_000)


@st.composite
def steps(draw: st.DrawFn, most_decode: int = 70) -> HostRows:
    decode = draw(st.lists(LENGTHS, max_size=most_decode))
    chunks = draw(st.lists(st.tuples(st.integers(1, 20) | st.integers(1, 700), LENGTHS), max_size=5))
    query_len = [1] * len(decode) + [q for q, _ in chunks]
    kv_len = decode + [q + before for q, before in chunks]
    numbers = draw(st.permutations(range(len(kv_len))))
    return HostRows(*(np.array(a, np.int32) if isinstance(a, list) else a for a in (list(numbers), len(decode))), *(np.array(a, np.int32) for a in (query_len, kv_len)))  # fmt: skip


def parts(work: Ints) -> tuple[Ints, Ints, Capacity]:
    items, tiles, capacity = int(work[0]), int(work[1]), Capacity(int(work[2]), int(work[3]))
    assert len(work) == capacity.size
    listed = work[HEADER:].reshape(-1, ITEM)
    return listed[:items], listed[capacity.items : capacity.items + tiles], capacity


def check(shape: WorkShape, rows: HostRows, bucket: Bucket | None) -> None:
    work = WorkLists(shape).make(rows, bucket)
    items, tiles, capacity = parts(work)
    start = np.cumsum(rows.query_len) - rows.query_len
    expected = {
        int(start[r] + i): (int(rows.rows[r]), int(rows.kv_len[r] - rows.query_len[r] + i + 1))
        for r in range(len(rows.rows))
        for i in range(rows.query_len[r])
    }
    met: dict[int, list[tuple[int, int]]] = {}
    places: list[int] = []
    for row, token, length, stretch, number, first, *unused in items.tolist():
        assert expected[token] == (row, length) and unused == [0, 0]
        begin, end = number * stretch, min((number + 1) * stretch, length)
        assert begin < end
        met.setdefault(token, []).append((begin, end))
        if stretch < length:
            places.append(first + number)
    for token, spans in met.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == expected[token][1]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert len(set(places)) == len(places) and all(0 <= p < capacity.items for p in places)
    pairs: dict[tuple[int, int], int] = {}
    for row, first, queries, length, tile, *unused in tiles.tolist():
        assert unused == [0, 0, 0]
        for m in range(tile * shape.tile, min((tile + 1) * shape.tile, queries * shape.group)):
            token = first + m // shape.group
            assert expected[token] == (row, length - queries + m // shape.group + 1)
            pair = token, m % shape.group
            pairs[pair] = pairs.get(pair, 0) + 1
    assert set(pairs.values()) <= {1}
    by_tiles = {token for token, _ in pairs}
    assert len(pairs) == len(by_tiles) * shape.group
    assert by_tiles | set(met) == set(expected) and not by_tiles & set(met)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(rows=steps())
@settings(max_examples=60, deadline=None)
def test_every_query_meets_every_key_once(shape: WorkShape, rows: HostRows) -> None:
    check(shape, rows, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(rows=steps(), spare=st.tuples(st.integers(0, 300), st.integers(0, 40), st.integers(0, 3)))
@settings(max_examples=60, deadline=None)
def test_a_step_fits_its_bucket(shape: WorkShape, rows: HostRows, spare: tuple[int, int, int]) -> None:
    chunks = len(rows.rows) - rows.num_decode
    sizes = int(rows.query_len.sum()), len(rows.rows), chunks
    bucket = Bucket(*(size + more for size, more in zip(sizes, spare, strict=True)))
    check(shape, rows, bucket)
    assert len(WorkLists(shape).make(rows, bucket)) == WorkLists(shape).capacity(bucket).size


def decode_only(lengths: list[int] | Ints) -> HostRows:
    count = len(lengths)
    return HostRows(np.arange(count, dtype=np.int32), count, np.ones(count, np.int32), np.array(lengths, np.int32))


@pytest.mark.parametrize(
    "lengths", [[32768], [5000] * 8, [1024] * 40, [1000] * 7, list(range(100, 8000, 120))], ids=len
)
def test_items_fill_the_device(lengths: list[int]) -> None:
    """Programs that take the listed items one after another end together, but for a tenth of the whole (a fifth
    where stretches would become too short)."""
    shape = SHAPES[0]
    items, *_ = parts(WorkLists(shape).make(decode_only(lengths), None))
    ends = np.zeros(shape.slots)
    for _, _, length, stretch, number, *_ in items.tolist():
        for _ in range(shape.kv_heads):
            ends[ends.argmin()] += min(stretch, length - number * stretch)
    assert ends.mean() / ends.max() > (0.9 if sum(lengths) > 16 * LEAST_STRETCH * 33 else 0.8)


def test_short_rows_are_whole() -> None:
    items, _, capacity = parts(WorkLists(SHAPES[0]).make(decode_only([5, LEAST_STRETCH, 17]), None))
    assert len(items) == capacity.items == 3 and (items[:, 4] == 0).all()


def test_stretches_follow_from_the_row_alone_when_deterministic() -> None:
    lists = WorkLists(SHAPES[1])
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 30_000, 100)
    together, *_ = parts(lists.make(decode_only(lengths), None))
    for r in range(0, 100, 9):
        alone, *_ = parts(lists.make(decode_only(lengths[r : r + 1]), None))
        assert set(together[together[:, 1] == r, 3]) == set(alone[:, 3])


def test_short_chunks_attend_as_decode_items_unless_deterministic() -> None:
    rows = HostRows(*(np.array(a, np.int32) if isinstance(a, list) else a for a in ([0, 1, 2], 1, [1, SHORT_CHUNK, 9], [7, 500, 9])))  # fmt: skip
    items, tiles, _ = parts(WorkLists(SHAPES[0]).make(rows, None))
    assert set(items[:, 1]) == set(range(1 + SHORT_CHUNK)) and set(tiles[:, 1]) == {9}
    items, tiles, _ = parts(WorkLists(SHAPES[1]).make(rows, None))
    assert set(items[:, 1]) == {0} and set(tiles[:, 1]) == {1, 9}


def test_no_rows() -> None:
    none = np.zeros(0, np.int32)
    for bucket in (None, Bucket(64, 64, 0), Bucket(64, 8, 4)):
        work = WorkLists(SHAPES[0]).make(HostRows(none, 0, none, none), bucket)
        assert (work[:2] == 0).all()


def test_a_list_is_made_quickly() -> None:
    """A step's list must not be what the device waits for: well under 60 µs on a machine that does nothing else."""
    lists, bucket = WorkLists(SHAPES[0]), Bucket(256, 256, 0)
    rows = decode_only(np.random.default_rng(1).integers(1, 8000, 256))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        lists.make(rows, bucket)
        times.append(time.perf_counter() - started)
    assert min(times) < 120e-6
