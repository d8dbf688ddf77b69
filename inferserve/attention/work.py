"""`WorkLists`: what the attention kernels do in a step, as lists of items made on the host in plain numpy.

A decode item is one stretch of one row's context, a tile is some neighbouring queries of one chunk. Lists have a fixed
capacity for a `Bucket`, so one captured launch serves any mix of rows: programs walk over the items that are there.
Rows are cut into stretches so that the items fill the device in whole waves, whatever the mix of lengths; when
deterministic, a row's stretches follow from its own length only. Knows no tensors and no requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferserve.attention.base import Bucket, HostRows, Ints
from inferserve.kernels.paged_kv import HEADER, ITEM

LEAST_STRETCH = 128
"""Keys of the shortest stretch a row is cut into: below it, starting an item costs more than it shares."""
GRANULE = 64
"""Stretches are multiples of it: only a row's last tile of keys is not whole."""
ITEM_COST = 64
"""What starting an item takes, in keys read by one program meanwhile."""
MOST_WAVES = 4
"""Rows are cut into at most as many stretches as fill the device this often."""
LEAST_FIXED = 256
"""The same when deterministic, where many rows are cut as if each were alone."""
MOST_FIXED = 16
"""Most stretches of a row when deterministic."""
SHORT_CHUNK = 8
"""Chunks up to this many tokens attend as decode items, one a token: as tiles they would wait for one long context."""

FEW_CHUNKS = 4
"""Chunks of a captured step that each have programs for all their tiles."""

_CUTS = range(1, 9)
_WAVES = range(1, MOST_WAVES + 1)


class WorkShape(NamedTuple):
    """What the lists depend on besides a step's rows.

    Attributes:
        kv_heads: of a layer.
        group: query heads that share a KV head.
        tile: rows of a tile: (token, head of the group) pairs.
        slots: decode programs that run at once on the device.
        deterministic: whether a row's result must not depend on the rows beside it.
    """

    kv_heads: int
    group: int
    tile: int
    slots: int
    deterministic: bool = False


class Capacity(NamedTuple):
    """Most decode items and most tiles of a list."""

    items: int
    tiles: int

    @property
    def size(self) -> int:
        """Int32s of such a list."""
        return HEADER + ITEM * (self.items + self.tiles)


class WorkLists:
    """Makes the lists of the layers of one shape.

    A list is int32: HEADER numbers (decode items, tiles, capacity for decode items, capacity for tiles), then ITEM
    numbers for each decode item, then for each tile; see `kernels.decode_attention` and `kernels.prefill_attention`
    for what they mean. What lies behind the used items of a part is never read.
    """

    def __init__(self, shape: WorkShape, longest: int | None = None) -> None:
        """Steps that are not captured leave chunks of more than `longest` tokens to others."""
        self.shape = shape
        self._longest = longest
        self._wave = max(1, shape.slots // shape.kv_heads)

    def capacity(self, bucket: Bucket) -> Capacity:
        """Enough for every step that fits `bucket`."""
        if not bucket.chunks:
            return Capacity(self._most_items(min(bucket.rows, bucket.tokens)), 0)
        tiles = bucket.tokens * self.shape.group // self.shape.tile
        if self.shape.deterministic:
            return Capacity(self._most_items(bucket.rows), tiles + bucket.chunks)
        items = self._most_items(min(bucket.rows + bucket.chunks * (SHORT_CHUNK - 1), bucket.tokens))
        return Capacity(items, tiles + min(bucket.chunks, bucket.tokens // (SHORT_CHUNK + 1)))

    def programs(self, bucket: Bucket | None, capacity: Capacity) -> tuple[int, int]:
        """Programs to launch for the decode items and the tiles of a step. Where a step has more than these, they share
        them; where a captured step has fewer, the others end at once, but that too takes time."""
        heads, slots = self.shape.kv_heads, self.shape.slots
        if bucket is None:
            return min(capacity.items * heads, MOST_WAVES * slots), capacity.tiles * heads
        items = min(capacity.items * heads, MOST_WAVES * slots, max(slots, 2 * bucket.rows * heads))
        tiles = bucket.tokens * self.shape.group // self.shape.tile + FEW_CHUNKS
        return items, min(tiles, capacity.tiles) * heads

    def make(self, rows: HostRows, bucket: Bucket | None) -> Ints:
        """The list of a step, sized for `bucket`, or for the step if there is none."""
        decode, chunks = self._parts(rows, None if bucket else self._longest)
        items, tiles = self._decode_items(*decode), self._tiles(*chunks)
        capacity = self.capacity(bucket) if bucket else Capacity(items.shape[1], tiles.shape[1])
        assert items.shape[1] <= capacity.items and tiles.shape[1] <= capacity.tiles, "the step does not fit its bucket"
        work = np.zeros(capacity.size, np.int32)
        work[:4] = items.shape[1], tiles.shape[1], *capacity
        for part, start in ((items, HEADER), (tiles, HEADER + ITEM * capacity.items)):
            width, count = part.shape
            work[start : start + ITEM * count].reshape(count, ITEM)[:, :width] = part.T
        return work

    def _parts(
        self, rows: HostRows, longest: int | None
    ) -> tuple[tuple[Ints, Ints, Ints], tuple[Ints, Ints, Ints, Ints]]:
        """(row, token, length) of decode tokens; (row, first token, queries, length) of chunks."""
        n = rows.num_decode
        if n == len(rows.rows):
            none = rows.rows[:0]
            return (rows.rows, np.arange(n, dtype=np.int32), rows.kv_len), (none, none, none, none)
        start = np.cumsum(rows.query_len, dtype=np.int32) - rows.query_len
        short = np.zeros(len(rows.rows), np.bool_) if self.shape.deterministic else rows.query_len <= SHORT_CHUNK
        short[:n] = True
        long = ~short if longest is None else ~short & (rows.query_len <= longest)
        chunks = rows.rows[long], start[long], rows.query_len[long], rows.kv_len[long]
        count = rows.query_len[short]
        if count.sum() == len(count):
            return (rows.rows[short], start[short], rows.kv_len[short]), chunks
        index = _index_within(count)
        token = np.repeat(start[short], count) + index
        length = np.repeat(rows.kv_len[short] - count, count) + index + 1
        return (np.repeat(rows.rows[short], count), token, length), chunks

    def _decode_items(self, row: Ints, token: Ints, length: Ints) -> Ints:
        """Int32 [6, items]: row, token, length, stretch, number of the stretch, first partial result of the row."""
        if not len(row):
            return np.zeros((6, 0), np.int32)
        stretch = self._fixed_stretch(length) if self.shape.deterministic else self._balanced_stretch(length)
        if len(row) > self._wave:  # the longest start first, so that none is left over at the end
            order = np.argsort(-stretch)
            row, token, length, stretch = row[order], token[order], length[order], stretch[order]
        count = -(-length // stretch)
        total = int(count.sum())
        if total == len(row):
            return _filled(row, token, length, stretch, 0, 0)
        split = np.where(count > 1, count, 0)
        fields = np.stack((row, token, length, stretch, np.cumsum(split, dtype=np.int32) - split))
        row, token, length, stretch, first = np.repeat(fields, count, axis=1)
        return _filled(row, token, length, stretch, _index_within(count), first)

    def _balanced_stretch(self, length: Ints) -> Ints:
        """Int32 [R]: of some ways to cut, the one that should end first.

        All items cost their keys and ITEM_COST. Started longest first, they end about when their mean over the programs
        is done, later by what the last wave leaves idle, and not before the longest.
        """
        keys, longest = int(length.sum()), int(length.max())
        if longest <= LEAST_STRETCH:
            return length
        wave, each = self._wave, max(1, self._wave // len(length))
        least = max(LEAST_STRETCH, keys / (wave * self._waves(len(length))))
        ways = (
            [longest / n for n in _CUTS] + [keys / (wave * n) for n in _WAVES] + [longest / (each * n) for n in _WAVES]
        )
        stretches = sorted({int(-(-max(way, least) // GRANULE)) * GRANULE for way in ways})
        tried = np.array(stretches, np.float32)
        items = np.ceil(length.astype(np.float32) / tried[:, None]).sum(axis=1)
        waves, largest = items / wave, np.minimum(tried, longest)
        end = (keys + items * ITEM_COST) / wave + largest * (np.ceil(waves) - waves)
        cut = stretches[int(np.maximum(end, largest + ITEM_COST).argmin())]
        if cut >= longest:
            return length
        parts = -(-length // cut) * GRANULE
        return -(-length // parts) * GRANULE

    def _waves(self, rows: int) -> int:
        """Of how many waves a cut may add items to those of `rows` whole rows."""
        return max(1, MOST_WAVES - rows // self._wave)

    def _fixed_stretch(self, length: Ints) -> Ints:
        stretch = -(-length // (MOST_FIXED * GRANULE)) * GRANULE
        return np.maximum(stretch, LEAST_FIXED)

    def _most_items(self, rows: int) -> int:
        """Bound of `_decode_items` for up to `rows` rows: a cut of at least keys / (waves x wave) adds at most
        waves x wave items to the rows, and `waves` falls with the number of rows."""
        if self.shape.deterministic:
            return rows * MOST_FIXED
        if not rows:
            return 0
        return max(rows + self._wave, MOST_WAVES * self._wave + min(rows, self._wave - 1))

    def _tiles(self, row: Ints, start: Ints, queries: Ints, length: Ints) -> Ints:
        """Int32 [5, tiles]: row, first token of the chunk, its queries, the row's length, number of the tile; those
        with the most keys first."""
        if not len(row):
            return np.zeros((5, 0), np.int32)
        group, tile = self.shape.group, self.shape.tile
        count = -(-queries * group // tile)
        index = _index_within(count)
        fields = np.repeat(np.stack((row, start, queries, length)), count, axis=1)
        newest = np.minimum(((index + 1) * tile - 1) // group, fields[2] - 1)
        keys = fields[3] - fields[2] + newest
        return np.concatenate((fields, index[None]))[:, np.argsort(-keys, kind="stable")]


def _filled(*fields: Ints | int) -> Ints:
    """The fields of all items, int32 [fields, items]; a number stands for as many."""
    out = np.empty((len(fields), len(np.atleast_1d(fields[0]))), np.int32)
    for to, field in zip(out, fields, strict=True):
        to[...] = field
    return out


def _index_within(count: Ints) -> Ints:
    """0, 1, … count[0] - 1, 0, 1, … count[1] - 1, …: int32."""
    end = np.cumsum(count, dtype=np.int32)
    total = int(end[-1]) if len(end) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(end - count, count)
