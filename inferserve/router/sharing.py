"""Which KV tokens of running prompts are held once for several rows, so that no token is counted twice.

A prompt is a chain of spans: granules of 256 tokens named by their digest, and a rest that only siblings can share. A
span held by one row is part of that row's own tokens; from the second holder on it belongs to nobody and is counted
in `tokens` until one holder is left. Knows the tree of the engine only through the hits it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferserve.protocol.digests import GRANULE, granule_digests


class Span(NamedTuple):
    """A stretch of a prompt: a key equal for equal prefixes, and its tokens."""

    key: bytes
    tokens: int


@dataclass(frozen=True)
class Overlap:
    """What a waiting prompt would share with running rows.

    Attributes:
        tokens: shared tokens.
        sole: (slot, tokens) of rows that hold some of them alone so far.
    """

    tokens: int = 0
    sole: tuple[tuple[int, int], ...] = ()


def granule_spans(prompt: NDArray[np.int32]) -> tuple[Span, ...]:
    """Full granules of a prompt (int32 ids) without its last token, which each row computes for its first output."""
    return tuple(Span(digest, GRANULE) for digest in granule_digests(prompt[:-1]))


class SharedSpans:
    """Holders of spans among the running rows.

    Args:
        own: int64 [slots], prompt tokens that only this row holds; kept up to date here.
    """

    def __init__(self, own: NDArray[np.int64]) -> None:
        self.tokens = 0
        self._own = own
        self._holders: dict[bytes, set[int]] = {}
        self._spans: dict[int, tuple[Span, ...]] = {}
        self._unsettled: dict[int, tuple[tuple[Span, ...], int]] = {}
        self._copies = 0

    def join(self, slot: int, prompt_len: int, spans: tuple[Span, ...], hits: int) -> None:
        """A row starts to run; `hits` leading spans of its prompt are in the engine's tree, the others it computes."""
        self._join(slot, prompt_len, spans, hits)
        self._unsettled[slot] = (spans, hits)

    def join_siblings(self, slots: list[int], prompt_len: int, spans: tuple[Span, ...], hits: int, ticket: int) -> None:
        """`n` rows of one prompt start to run: the first is like any other row, the others share all it has.

        Args:
            ticket: a number of this group alone.
        """
        rest = Span(b"rest" + ticket.to_bytes(8, "little"), prompt_len - 1 - GRANULE * len(spans))
        self._join(slots[0], prompt_len, (*spans, rest), hits)
        for slot in slots[1:]:
            self._join(slot, prompt_len, self._spans[slots[0]], len(spans) + 1)

    def settle(self, slot: int, prompt_len: int, find: Callable[[tuple[Span, ...]], int]) -> None:
        """The row has computed its prompt, which is in the tree now, and shares what others have there.

        Args:
            find: how many leading spans are in the tree by the newest hints.
        """
        spans, hits = self._unsettled.pop(slot, ((), 0))
        found = find(spans)
        if found != hits:
            self.leave(slot)
            self._join(slot, prompt_len, spans, found)

    def leave(self, slot: int) -> None:
        """The row is gone."""
        self._unsettled.pop(slot, None)
        for key, tokens in self._spans.pop(slot):
            holders = self._holders[key]
            holders.discard(slot)
            if not holders:
                del self._holders[key]
            elif len(holders) == 1:
                (owner,) = holders
                self._own[owner] += tokens
                self.tokens -= tokens

    def overlap(self, spans: tuple[Span, ...], hits: int) -> Overlap:
        """What a prompt with `hits` leading spans in the tree would share with rows that run now."""
        tokens = 0
        sole: dict[int, int] = {}
        for span in spans[:hits]:
            holders = self._holders.get(span.key)
            if not holders:
                break
            tokens += span.tokens
            if len(holders) == 1:
                (owner,) = holders
                sole[owner] = sole.get(owner, 0) + span.tokens
        return Overlap(tokens, tuple(sole.items()))

    def check(self) -> None:
        """Raise AssertionError if the counts disagree with the holders."""
        tokens = {span.key: span.tokens for spans in self._spans.values() for span in spans}
        holders: dict[bytes, set[int]] = {}
        for slot, spans in self._spans.items():
            for span in spans:
                holders.setdefault(span.key, set()).add(slot)
        assert holders == self._holders
        assert self.tokens == sum(tokens[key] for key, who in holders.items() if len(who) > 1)

    def _join(self, slot: int, prompt_len: int, spans: tuple[Span, ...], hits: int) -> None:
        named = []
        self._own[slot] = prompt_len
        for position, span in enumerate(spans):
            holders = self._holders.get(span.key)
            if not holders:
                self._holders[span.key] = {slot}
            elif position < hits:
                self._share(slot, span.tokens, holders)
            else:
                # Another running row computed the same tokens for itself: this one's copy needs a name of its own.
                self._copies += 1
                span = Span(span.key + self._copies.to_bytes(8, "little"), span.tokens)
                self._holders[span.key] = {slot}
            named.append(span)
        self._spans[slot] = tuple(named)

    def _share(self, slot: int, tokens: int, holders: set[int]) -> None:
        if len(holders) == 1:
            (owner,) = holders
            self._own[owner] -= tokens
            self.tokens += tokens
        self._own[slot] -= tokens
        holders.add(slot)
