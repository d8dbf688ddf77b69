"""`Row`: the text of one running sequence, from ids to what the client may see. Knows no slots and sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

from inferserve.detokenize.incremental import TextStream
from inferserve.detokenize.stop_strings import StopFilter
from inferserve.protocol.sampling import SamplingParams


class Row:
    """Incremental text, then stop strings.

    Args:
        generation: of the slot.
        params: of the sequence.
        stream: an open text stream.
        stops: the filter, None without stop strings. The first `params.min_tokens` tokens take no part in it.

    Attributes:
        position: output tokens taken so far.
        closed: the last item has been sent (stop string, fault); only the engine's end is awaited.
    """

    __slots__ = ("_stops", "_stream", "closed", "generation", "params", "position")

    def __init__(self, generation: int, params: SamplingParams, stream: TextStream, stops: StopFilter | None) -> None:
        self.generation = generation
        self.params = params
        self.position = 0
        self.closed = False
        self._stream = stream
        self._stops = stops

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.matched

    def take_one(self, token_id: int) -> str:
        """Text to show for the next id."""
        text = self._stream.push(token_id)
        if self._stops is not None and self.position >= self.params.min_tokens:
            text = self._stops.push(text)
        self.position += 1
        return text

    def take(self, ids: Sequence[int]) -> str:
        """Text to show for the next ids; stops, and stops counting, at the one that completes a stop string."""
        parts = []
        for token_id in ids:
            parts.append(self.take_one(token_id))
            if self.matched is not None:
                break
        return "".join(parts)

    def finish(self) -> str:
        """What was held back until now: the end of the text."""
        tail = self._stream.flush()
        if self._stops is None:
            return tail
        if self.position > self.params.min_tokens:
            tail = self._stops.push(tail)
        return tail if self._stops.matched is not None else tail + self._stops.flush()
