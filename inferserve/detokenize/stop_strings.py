"""Stop strings in a text that arrives in pieces: where the first one ends, and what may be shown until then.

The automaton of Aho and Corasick (CACM 18(6), 1975) reads each character once, so where tokens or chunks end makes no
difference, and the length of its current match is exactly the tail that may still become a stop string. The first stop
string to be complete wins; of several that end at the same character, the longest. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import deque


class StopAutomaton:
    """All stop strings of a request. Immutable; rows with the same strings share it."""

    __slots__ = ("_fail", "_next", "depth", "first", "stop")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.stop: list[str] = [""]
        self.first = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after `char`: the longest tail of the text that begins a stop string."""
        following = self._next
        while char not in following[state]:
            if not state:
                return 0
            state = self._fail[state]
        return following[state][char]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop.append("")
            state = self._next[state][char]
        self.stop[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first; a state also stops where its failure state does."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self.stop[child] = self.stop[child] or self.stop[self._fail[child]]
                queue.append(child)


class StopFilter:
    """Lets text through up to the first stop string.

    Args:
        automaton: the stop strings.
        include_stop: show the stop string too; then nothing needs to be held back.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, automaton: StopAutomaton, include_stop: bool) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. After a match `matched` is the stop string and nothing more comes."""
        automaton, state = self._automaton, self._state
        if not state and automaton.first.isdisjoint(text):
            return text
        for index, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            if automaton.stop[state]:
                return self._matched(self._held + text, index, automaton.stop[state])
        self._state = state
        if self._include:
            return text
        text = self._held + text
        shown = len(text) - automaton.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held tail: the text ended and it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _matched(self, text: str, end: int, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text[: end if self._include else end - len(stop)]
