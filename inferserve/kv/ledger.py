"""`KvLedger`: which pool index holds which token of which row. A deterministic, torch-free state machine.

Every rank of an engine keeps one and feeds it the same calls, so they stay equal without talking; `digest()` shows it.
A row's page-table entries [0, shared) belong to the prefix tree, which the row keeps locked; [shared, length) are the
row's own. Pausing a row is `close` with the tokens that may be cached, resuming it is `open`. Knows no requests.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from inferserve.errors import KvExhausted
from inferserve.kv.allocator import TokenAllocator
from inferserve.kv.radix import Node, RadixTree
from inferserve.kv.run import Ints
from inferserve.protocol.messages import KvCounters

EVICT_SHARE = 64
"""At least this part of the pool is evicted at a time, so that decoding under pressure does not evict in every step."""

_STACK_SAMPLE = 256


class KvLedger:
    """Rows of one engine over one KV pool.

    Attributes:
        table: int32 [max_rows, max_len], page table: pool index of each position, valid below `length`.
        length: int32 [max_rows], tokens of each row that have a place in the pool.
        shared: int32 [max_rows], how many of them belong to the prefix tree.
        shares: whether rows share prefixes and leave theirs behind; False = no prefix cache.
    """

    def __init__(self, total: int, max_rows: int, max_len: int, prefix_cache: bool = True) -> None:
        self.table: Ints = np.zeros((max_rows, max_len), dtype=np.int32)
        self.length: Ints = np.zeros(max_rows, dtype=np.int32)
        self.shared: Ints = np.zeros(max_rows, dtype=np.int32)
        self.shares = prefix_cache
        self._pool = TokenAllocator(total)
        self._tree = RadixTree()
        self._held: list[Node | None] = [None] * max_rows
        self._news = _PrefixNews()
        self._new_prefix: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Tokens of the pool."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Tokens that `extend` can still give: free ones and those it may evict."""
        return self._pool.free_count + self._tree.total - self._tree.pinned

    # ---------------------------------------------------------------------------------------------- rows

    def open(self, row: int, tokens: Ints) -> int:
        """Take the longest cached prefix of `tokens` for `row`, at least one token short of all of them.

        Args:
            tokens: int32 [n], n >= 1, all tokens the row is about to compute.

        Returns:
            Length of the prefix: KV that need not be computed.
        """
        assert self._held[row] is None, f"row {row} is open"
        prefix = tokens[: len(tokens) - 1] if self.shares else tokens[:0]
        match = self._tree.match(prefix)
        self._tree.lock(match.node)
        self._held[row] = match.node
        n = len(match.indices)
        self.table[row, :n] = match.indices
        self.length[row] = self.shared[row] = n
        if n:
            self._new_prefix[row] = n
        return n

    def extend(self, rows: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Give each of `rows` places for its next `counts` tokens, evicting what must go.

        Args:
            rows: int32 [R], distinct open rows.
            counts: int32 [R].

        Returns:
            For each of the T = counts.sum() tokens, row by row: its row, its position and its pool index, int32 [T].
            Raises KvExhausted, changing no row, when `available` < T.
        """
        total = int(counts.sum())
        self._make_room(total)
        start = self.length[rows]
        if total == len(rows) and counts.all():
            owner, positions = rows, start.copy()
        else:
            owner = np.repeat(rows, counts)
            before = np.cumsum(counts, dtype=np.int32) - counts
            positions = np.repeat(start - before, counts) + np.arange(total, dtype=np.int32)
        indices = self._pool.alloc(total)
        self.table[owner, positions] = indices
        self.length[rows] = start + counts
        return owner, positions, indices

    def _make_room(self, tokens: int) -> None:
        short = tokens - self._pool.free_count
        if short <= 0:
            return
        if tokens > self.available:
            raise KvExhausted(f"{tokens} tokens asked for, {self.available} of {self.total} available")
        evicted = self._tree.evict(max(short, self.total // EVICT_SHARE))
        self._pool.free(evicted.indices)
        self._news.went(evicted.digests)

    def truncate(self, row: int, length: int) -> None:
        """Take back the places of a row's own tokens from position `length` on (speculative or not computed)."""
        stop = int(self.length[row])
        assert self.shared[row] <= length <= stop, f"row {row}: cannot cut {stop} to {length}"
        self._pool.free(self.table[row, length:stop])
        self.length[row] = length

    def publish(self, row: int, tokens: Ints) -> None:
        """Put a row's KV of its leading `tokens` into the cache while it runs; others can share it from now on.

        Args:
            tokens: int32 [n], n <= length, whose KV is known to be good. Where another row was faster, this row
                switches to its KV.
        """
        if not self.shares or len(tokens) <= self.shared[row]:
            return
        self._release_prefix(row)
        self._cache(row, tokens)
        match = self._tree.match(tokens)
        self._tree.lock(match.node)
        self._held[row] = match.node
        if not np.array_equal(self.table[row, : len(tokens)], match.indices):
            self.table[row, : len(tokens)] = match.indices
            self._new_prefix[row] = len(tokens)
        self.shared[row] = len(tokens)

    def close(self, row: int, tokens: Ints) -> None:
        """End or pause a row: its leading `tokens` go to the cache, the places of the others are free again.

        Args:
            tokens: int32 [n], n <= length, whose KV is known to be good; empty to cache nothing (a failed row).
        """
        keep = max(len(tokens) if self.shares else 0, int(self.shared[row]))
        self.truncate(row, keep)
        self._release_prefix(row)
        if keep > self.shared[row]:
            self._cache(row, tokens)
        self.length[row] = self.shared[row] = 0
        self._new_prefix.pop(row, None)

    def _cache(self, row: int, tokens: Ints) -> None:
        """Insert table[row, :n] under `tokens` and free those places that the tree already had otherwise."""
        inserted = self._tree.insert(tokens, self.table[row, : len(tokens)])
        self._news.came(inserted.digests)
        self._pool.free(self.table[row, self.shared[row] : inserted.present])

    def _release_prefix(self, row: int) -> None:
        node = self._held[row]
        assert node is not None, f"row {row} is not open"
        self._tree.unlock(node)
        self._held[row] = None

    # ---------------------------------------------------------------------------------------------- reports

    def counters(self, running: int, paused: int, queued: int = 0) -> KvCounters:
        """The pool now, with the row counts that only the caller knows."""
        cached = self._tree.total - self._tree.pinned
        free = self._pool.free_count
        return KvCounters(self.total, self.total - cached - free, cached, free, running, paused, queued)

    def take_new_prefixes(self) -> tuple[tuple[int, int], ...]:
        """(row, length) of rows whose first `length` table entries were set other than by `extend` since the last call."""
        taken = tuple(self._new_prefix.items())
        self._new_prefix.clear()
        return taken

    def take_digests(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Granules that became cached, and that were evicted, since the last call; net, so none is in both."""
        return self._news.take()

    def digest(self) -> bytes:
        """16 bytes that are equal for two ledgers with the same history. O(max_rows)."""
        free = self._pool.free_indices()
        state = blake2b(digest_size=16)
        for part in (self.length, self.shared, free[-_STACK_SAMPLE:]):
            state.update(part.tobytes())
        state.update(b"%d %d %d" % (len(free), self._tree.total, self._tree.pinned))
        return state.digest()

    def check(self) -> None:
        """Raise AssertionError unless every pool index has exactly one owner and all counts agree. O(total)."""
        self._pool.check()
        self._tree.check()
        owned = [self._pool.free_indices(), self._tree.indices()]
        for row, node in enumerate(self._held):
            shared, length = int(self.shared[row]), int(self.length[row])
            assert 0 <= shared <= length
            assert node is not None or length == 0, f"row {row} is closed but holds {length} tokens"
            assert node is None or node.end == shared, f"row {row} has locked {node} but shares {shared}"
            owned.append(self.table[row, shared:length])
        counts = np.bincount(np.concatenate(owned), minlength=self.total)
        assert len(counts) == self.total and (counts == 1).all(), "a pool index is lost or has two owners"
        assert sum(node is not None for node in self._held) == self._tree.locks(), "locks without rows"


class _PrefixNews:
    """Net changes of cached granules between two reports."""

    def __init__(self) -> None:
        self._came: dict[bytes, None] = {}
        self._went: dict[bytes, None] = {}

    def came(self, digests: list[bytes]) -> None:
        for digest in digests:
            if digest in self._went:
                del self._went[digest]
            else:
                self._came[digest] = None

    def went(self, digests: list[bytes]) -> None:
        for digest in digests:
            if digest in self._came:
                del self._came[digest]
            else:
                self._went[digest] = None

    def take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        taken = tuple(self._came), tuple(self._went)
        self._came.clear()
        self._went.clear()
        return taken
