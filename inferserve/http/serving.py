"""`Serving`: whether this worker takes requests, and how many it has. Readiness, draining and stopping are read here."""

from __future__ import annotations

from collections.abc import Callable

from inferserve.errors import Unavailable


class Serving:
    """starting → ready → draining → stopping.

    Args:
        on_drained: called each time that draining has begun and no request is left.
    """

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self.ready = False
        self.draining = False
        self.stopping = False
        self.in_flight = 0
        self._on_drained = on_drained

    def refusal(self) -> Unavailable | None:
        """Why new requests are refused now, None while they are taken."""
        if self.stopping or self.draining:
            return Unavailable("The server is shutting down.", code="shutting_down")
        if not self.ready:
            return Unavailable("The server is starting.", retry_after=1, code="starting")
        return None

    def enter(self) -> None:
        """A request begins. Raises Unavailable while none is taken."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self.in_flight += 1

    def leave(self) -> None:
        """It ended, its answer written."""
        self.in_flight -= 1
        self._report()

    def drain(self) -> None:
        """Refuse new requests; say so when the running ones are done."""
        self.draining = True
        self._report()

    def _report(self) -> None:
        if self.draining and not self.in_flight:
            self._on_drained()
