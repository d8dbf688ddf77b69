"""`PrefixHints`: which prefixes the engine's tree holds, by digest, as far as step reports have told.

A hint may be old: a prefix it names may be evicted by now, which costs a pause, never a wrong result. Knows nothing of
rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferserve.router.sharing import Span


class PrefixHints:
    """A set of digests; the engine's pool bounds its size."""

    def __init__(self) -> None:
        self._cached: set[bytes] = set()

    def __len__(self) -> int:
        """Granules known to be in the tree."""
        return len(self._cached)

    def update(self, cached: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Digests that entered and left the tree in one step; one in both is taken as evicted."""
        self._cached.update(cached)
        self._cached.difference_update(evicted)

    def hits(self, spans: tuple[Span, ...]) -> int:
        """How many leading spans of a prompt are expected in the tree."""
        for count, span in enumerate(spans):
            if span.key not in self._cached:
                return count
        return len(spans)
