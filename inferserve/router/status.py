"""`StatusLine`: one log line every few seconds while something happens, and the two gauges that are rates.

Knows nothing of queue or engine; the loop tells it what a step did and, when it is due, how things stand.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from inferserve.log import event

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """How things stand: sequence counts and the used share of the KV pool."""

    running: int
    waiting: int
    paused: int
    kv_usage: float

    @property
    def busy(self) -> bool:
        """Something runs or waits."""
        return bool(self.running or self.waiting)


@dataclass(frozen=True)
class Rates:
    """Means over one interval: tokens per second, and the share of prompt tokens found in the prefix cache."""

    prompt: float
    generation: float
    prefix_hit: float


class StatusLine:
    """Sums of the current interval.

    Args:
        interval_s: seconds between lines.
        enabled: False = rates only, no line.
        now: time.monotonic().
    """

    def __init__(self, interval_s: float, enabled: bool, now: float) -> None:
        self._interval = interval_s
        self._enabled = enabled
        self._since = now
        self._prompt = self._generated = self._looked_up = self._found = 0
        self._quiet = True

    def step(self, prompt_tokens: int, generated_tokens: int, now: float) -> None:
        """A step computed this many prompt tokens and generated this many."""
        self.wake(now)
        self._prompt += prompt_tokens
        self._generated += generated_tokens

    def prefix(self, looked_up: int, found: int) -> None:
        """A row started: prompt tokens, and how many of them the prefix cache had."""
        self._looked_up += looked_up
        self._found += found

    def wake(self, now: float) -> None:
        """Something happened: if all was quiet, the interval begins now."""
        if self._quiet:
            self._quiet = False
            self._since = now

    def due_in(self, now: float) -> float:
        """Seconds until the next line is due; infinite while all is quiet."""
        return math.inf if self._quiet else max(0.0, self._since + self._interval - now)

    def end_interval(self, now: float, standing: Standing) -> Rates | None:
        """If an interval is over: log it and return its rates."""
        if self._quiet or now - self._since < self._interval:
            return None
        seconds = now - self._since
        hit = self._found / self._looked_up if self._looked_up else 0.0
        rates = Rates(self._prompt / seconds, self._generated / seconds, hit)
        happened = standing.busy or self._prompt or self._generated
        if happened and self._enabled:
            event(
                log,
                "status",
                prompt_tok_s=f"{rates.prompt:.1f}",
                generation_tok_s=f"{rates.generation:.1f}",
                running=standing.running,
                waiting=standing.waiting,
                paused=standing.paused,
                kv_usage=f"{standing.kv_usage:.1%}",
                prefix_hit=f"{rates.prefix_hit:.1%}",
            )
        self._since = now
        self._prompt = self._generated = self._looked_up = self._found = 0
        self._quiet = not happened
        return rates
