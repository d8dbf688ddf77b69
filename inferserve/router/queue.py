"""`WaitingQueue`: requests that are not admitted yet, first come first served; any member leaves in O(1).

A request waits as one `Group` of `n` siblings with one prompt. Knows nothing of memory; `admission.py` says whether
the head may go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from inferserve.protocol.messages import SlotRef
from inferserve.router.sharing import Span


@dataclass
class Group:
    """Siblings that wait: the same prompt and limits, different seeds.

    Attributes:
        members: slot index → its reference, in the order of the request; the first one prefills.
        spans: the prompt's shareable spans, None until someone asks.
    """

    members: dict[int, SlotRef]
    prompt_len: int
    max_tokens: int
    ignore_eos: bool
    spans: tuple[Span, ...] | None = None
    ticket: int = field(default=0, compare=False)


class WaitingQueue:
    """Groups by ticket; a later priority is another key in front of the ticket."""

    def __init__(self) -> None:
        # An OrderedDict finds its first key at once; a dict walks over all that were deleted before it.
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._group_of: dict[int, Group] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._group_of)

    def __iter__(self) -> Iterator[Group]:
        """Groups in order; do not change the queue meanwhile."""
        return iter(self._groups.values())

    def put(self, group: Group) -> None:
        """Join at the end."""
        self._tickets += 1
        group.ticket = self._tickets
        self._groups[group.ticket] = group
        self._group_of.update(dict.fromkeys(group.members, group))

    def head(self) -> Group | None:
        """Who is next."""
        return next(iter(self._groups.values()), None)

    def find(self, index: int) -> SlotRef | None:
        """The waiting reference of a slot."""
        group = self._group_of.get(index)
        return group.members[index] if group else None

    def remove(self, ref: SlotRef) -> bool:
        """Take one member out, wherever it waits; False if it does not wait (or in another generation)."""
        if self.find(ref.index) != ref:
            return False
        group = self._group_of.pop(ref.index)
        del group.members[ref.index]
        if not group.members:
            del self._groups[group.ticket]
        return True

    def take(self, group: Group, count: int) -> list[SlotRef]:
        """Take the first `count` members of a group out."""
        refs = list(group.members.values())[:count]
        for ref in refs:
            self.remove(ref)
        return refs

    def members(self, first: int, last: int) -> list[SlotRef]:
        """Waiting references with a slot index in [first, last)."""
        return [g.members[i] for i, g in self._group_of.items() if first <= i < last]

    def check(self) -> None:
        """Raise AssertionError if the two indexes disagree."""
        listed = {i: g for g in self._groups.values() for i in g.members}
        assert listed == self._group_of and all(g.members for g in self._groups.values())
        assert all(ticket == g.ticket for ticket, g in self._groups.items())
