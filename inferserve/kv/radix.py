"""`RadixTree`: which token prefixes have their KV in the pool, to the token. Knows nothing of rows or of the allocator.

A node is a stretch of tokens; its path from the root spells a cached prefix. Running sequences lock the node where
their prefix ends, which pins it and all its ancestors. What is not pinned is evicted from the ends of the leaves, least
recently used first. Nothing recurses. A seam that no lock needs any more is closed when one side is short, so a chain of n tokens
has O(n / SEAM) nodes however it was built.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from inferserve.kv.run import Ints, TokenRun
from inferserve.protocol.digests import GRANULE, granule_digests

SEAM = 4 * GRANULE
"""Neighbours are joined when one is shorter than this many tokens; LRU order is kept for longer ones."""


class Node:
    """One stretch of a path.

    Attributes:
        run: its tokens and their KV indexes.
        depth: position of its first token in the sequence.
        digests: of the granules that end inside it.
        locks: sequences whose prefix ends where the node ends.
        pinned_children: how many children are pinned.
        stamp: logical time of the last use.
        queued: whether the eviction heap holds it.
    """

    __slots__ = ("children", "depth", "digests", "locks", "parent", "pinned_children", "queued", "run", "stamp")

    def __init__(self, run: TokenRun, parent: Node | None, depth: int, stamp: int) -> None:
        self.run = run
        self.parent = parent
        self.depth = depth
        self.stamp = stamp
        self.children: dict[int, Node] = {}
        self.digests: list[bytes] = []
        self.locks = 0
        self.pinned_children = 0
        self.queued = False

    @property
    def pinned(self) -> bool:
        """True when a lock on it or below it keeps it."""
        return self.locks > 0 or self.pinned_children > 0

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.depth + len(self.run)


class Match(NamedTuple):
    """The longest cached prefix: KV indexes, int32 [n], and the node that ends there."""

    indices: Ints
    node: Node


class Inserted(NamedTuple):
    """Tokens that were there before, and digests of the granules that are complete only now."""

    present: int
    digests: list[bytes]


class Evicted(NamedTuple):
    """Freed KV indexes, int32 [n], and digests of the granules that are not complete any more."""

    indices: Ints
    digests: list[bytes]


_NOTHING: Ints = np.zeros(0, dtype=np.int32)
_NOTHING.flags.writeable = False

_FEW = 64
"""Dead entries of the eviction queue that are not worth a clean-up."""


class RadixTree:
    """The tree. `total` tokens are cached, of which `pinned` cannot be evicted now."""

    def __init__(self) -> None:
        self.total = 0
        self.pinned = 0
        self._clock = 0
        self._pushes = 0
        self._root = Node(TokenRun(_NOTHING, _NOTHING), None, 0, 0)
        self._heap: list[tuple[int, int, Node]] = []
        self._dead = 0

    # ------------------------------------------------------------------------------------------- look-up and locks

    def match(self, tokens: Ints) -> Match:
        """The longest cached prefix of `tokens`, int32 [n]; counts as a use. `lock` the node before anything else."""
        path, offset = self._walk(tokens)
        if offset:
            path[-1] = self._split(path[-1], offset)
        parts = [node.run.indices for node in path]
        return Match(np.concatenate(parts) if parts else _NOTHING, path[-1] if path else self._root)

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends with `node`."""
        was_pinned = node.pinned
        node.locks += 1
        while not was_pinned and node.parent is not None:
            self.pinned += len(node.run)
            node = node.parent
            was_pinned = node.pinned
            node.pinned_children += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        assert node.locks > 0, "unlock without lock"
        node.locks -= 1
        above: Node | None = node
        while above is not None and not above.pinned and above.parent is not None:
            self.pinned -= len(above.run)
            self._offer(above)
            above = above.parent
            above.pinned_children -= 1
        parent = node.parent
        self._close_seam(node)
        if parent is not None:
            self._close_seam(parent)

    def _walk(self, tokens: Ints) -> tuple[list[Node], int]:
        """Nodes along `tokens` below the root; how much of the last one matches, 0 for all of it."""
        self._clock += 1
        node, done, path = self._root, 0, []
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            path.append(child)
            size = len(child.run)
            same = child.run.common(tokens[done:]) if size > 1 else 1
            if same < size:
                return path, same
            child.stamp = self._clock
            done += same
            node = child
        return path, 0

    # ---------------------------------------------------------------------------------------------- growing

    def insert(self, tokens: Ints, indices: Ints) -> Inserted:
        """Cache a prefix; counts as a use.

        Args:
            tokens, indices: int32 [n]. The tree takes over indices[present:]; the caller still owns those before,
                where they differ from the tree's.
        """
        path, offset = self._walk(tokens)
        if offset:
            path[-1] = self._split(path[-1], offset)
        node = path[-1] if path else self._root
        present = node.end
        if present == len(tokens):
            return Inserted(present, [])
        whole = present // GRANULE * GRANULE
        digests = granule_digests(tokens[whole:], self._last_digest(node))
        if node.parent is not None and not node.children and not node.locks:
            node.run.append(tokens[present:], indices[present:])
        else:
            parent, node = node, Node(TokenRun(tokens[present:], indices[present:]), node, present, self._clock)
            parent.children[node.run.first] = node
        node.digests += digests
        self.total += len(tokens) - present
        self._offer(node)
        return Inserted(present, digests)

    @staticmethod
    def _last_digest(node: Node | None) -> bytes:
        while node is not None:
            if node.digests:
                return node.digests[-1]
            node = node.parent
        return b""

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; returns the new upper node, just used. Locks stay with the lower one."""
        assert node.parent is not None
        upper = Node(node.run.split(at), node.parent, node.depth, self._clock)
        node.parent.children[upper.run.first] = upper
        upper.children[node.run.first] = node
        upper.pinned_children = int(node.pinned)
        ends = upper.end // GRANULE - upper.depth // GRANULE
        upper.digests, node.digests = node.digests[:ends], node.digests[ends:]
        node.parent, node.depth = upper, upper.end
        return upper

    def _close_seam(self, node: Node) -> None:
        """Join `node` with its only child if no lock ends between them and one of them is short."""
        if node.parent is None or node.locks or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.locks or min(len(node.run), len(child.run)) >= SEAM:
            return
        if len(child.run) > len(node.run):
            node.stamp = child.stamp
        node.run.absorb(child.run)
        node.digests += child.digests
        node.children, node.pinned_children = child.children, child.pinned_children
        for grandchild in node.children.values():
            grandchild.parent = node
        child.parent, child.children = None, {}
        self._dead += child.queued
        self._bury()
        self._offer(node)

    # ---------------------------------------------------------------------------------------------- eviction

    def evict(self, n: int) -> Evicted:
        """Drop `n` tokens, or as many as are not pinned, from the least recently used ends."""
        parts: list[Ints] = []
        digests: list[bytes] = []
        short = n
        while short > 0 and self._heap:
            stamp, _, node = heappop(self._heap)
            node.queued = False
            if node.parent is None:
                self._dead -= 1
            elif stamp != node.stamp:
                self._offer(node)
            elif self._evictable(node):
                take = min(short, len(node.run))
                short -= take
                digests += self._trim(node, take, parts)
        self.total -= n - short
        return Evicted(np.concatenate(parts) if parts else _NOTHING, digests)

    def _trim(self, node: Node, take: int, parts: list[Ints]) -> list[bytes]:
        """Cut `take` tokens off a leaf, removing it when none is left; returns the digests that go."""
        parent, first = node.parent, node.run.first
        assert parent is not None
        parts.append(node.run.trim(take))
        kept = node.end // GRANULE - node.depth // GRANULE
        gone = node.digests[kept:]
        del node.digests[kept:]
        if len(node.run):
            self._offer(node)
        else:
            del parent.children[first]
            node.parent = None
            parent.run.fit()
            self._offer(parent)
            self._close_seam(parent)
        return gone

    @staticmethod
    def _evictable(node: Node) -> bool:
        return not node.children and not node.pinned and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Queue `node` for eviction if it may go; once at a time, a stale stamp is noticed when it comes up."""
        if not node.queued and self._evictable(node):
            self._pushes += 1
            node.queued = True
            heappush(self._heap, (node.stamp, self._pushes, node))

    def _bury(self) -> None:
        """Forget joined nodes once they are the larger part of the queue."""
        if self._dead * 2 > len(self._heap) + _FEW:
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            heapify(self._heap)
            self._dead = 0

    # ---------------------------------------------------------------------------------------------- audits

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def indices(self) -> Ints:
        """Every KV index in the tree, in no promised order."""
        parts = [node.run.indices for node in self.nodes()]
        return np.concatenate(parts) if parts else _NOTHING

    def locks(self) -> int:
        """Locks held now. O(nodes)."""
        return self._root.locks + sum(node.locks for node in self.nodes())

    def check(self) -> None:
        """Raise AssertionError on any broken invariant. O(total)."""
        total = pinned = 0
        queued = {id(node) for _, _, node in self._heap}
        for node in [self._root, *self.nodes()]:
            total += len(node.run)
            pinned += len(node.run) if node.pinned else 0
            assert node.pinned_children == sum(child.pinned for child in node.children.values())
            for first, child in node.children.items():
                assert child.parent is node and child.run.first == first and child.depth == node.end
            if node.parent is not None:
                assert len(node.run) > 0, "an empty node"
                assert len(node.digests) == node.end // GRANULE - node.depth // GRANULE
                assert node.queued == (id(node) in queued)
                assert node.queued or not self._evictable(node), "an evictable leaf is not queued"
        assert (total, pinned) == (self.total, self.pinned)
        assert self._dead == sum(node.parent is None for _, _, node in self._heap) <= len(self._heap) / 2 + _FEW
