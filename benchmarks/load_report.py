"""Figures of a run from its outcomes: rates, latencies, counts, failures. Pure arithmetic; knows no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load_events import Outcome

_MS = 1e6
_SHORTEST_WINDOW_S = 1.0


def quantiles(values: Sequence[float] | NDArray[Any], digits: int = 2) -> dict[str, float]:
    """p50, p90, p99, mean, max (linear interpolation); {} of nothing."""
    if not len(values):
        return {}
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    figures = {"p50": p50, "p90": p90, "p99": p99, "mean": array.mean(), "max": array.max()}
    return {name: round(float(value), digits) for name, value in figures.items()}


def tokens_per_event(outcomes: list[Outcome]) -> list[float]:
    """Of each request, on average; of one without usage (it was cut, say) what the others have, 1 if none tells."""
    known = [o for o in outcomes if o.tokens > 0 and o.times and not o.error and not o.cut]
    events = sum(len(o.times) for o in known)
    usual = sum(o.tokens for o in known) / events if events else 1.0
    told = {id(o): o.tokens / len(o.times) for o in known}
    return [told.get(id(o), usual) for o in outcomes]


def report(outcomes: list[Outcome], begin_ns: int, idle_ns: int) -> dict[str, Any]:
    """All figures.

    Args:
        outcomes: every request that was sent.
        begin_ns: start of the run.
        idle_ns: when the first client had nothing more to send.

    `output_tok_s.total` is all tokens over the time from the start to the last of them. `steady` counts from the moment
    at which every client had its first token to `idle_ns`, if that is at least a second. `itl_ms` is each gap
    between two events of a stream over the tokens that an event carries in that stream on average.
    """
    whole = [o for o in outcomes if not o.error and not o.cut]
    sizes = tokens_per_event(outcomes)
    with_text = [o for o in outcomes if o.times]
    end_ns = max((o.end_ns for o in outcomes), default=begin_ns)
    figures: dict[str, Any] = {
        "output_tok_s": _rates(outcomes, sizes, begin_ns, idle_ns, end_ns),
        "wall_s": round((end_ns - begin_ns) / 1e9, 3),
        "requests": {
            "sent": len(outcomes),
            "complete": len(whole),
            "failed": sum(bool(o.error) for o in outcomes),
            "cut_at_the_end": sum(o.cut and not o.error for o in outcomes),
        },
        "errors": dict(Counter(o.error for o in outcomes if o.error)),
        "tokens": _tokens(whole, outcomes, sizes),
        "ttft_ms": quantiles([(o.times[0] - o.due_ns) / _MS for o in with_text]),
        "itl_ms": quantiles(_gaps(outcomes, sizes), 3),
        "event_gap_ms": quantiles(_gaps(outcomes, [1.0] * len(outcomes)), 3),
        "e2e_ms": quantiles([(o.end_ns - o.due_ns) / _MS for o in whole]),
    }
    turns = sorted({o.turn for o in outcomes})
    if len(turns) > 1:
        figures["turns"] = [_turn(turn, [o for o in outcomes if o.turn == turn]) for turn in turns]
    return figures


def _rates(outcomes: list[Outcome], sizes: list[float], begin_ns: int, idle_ns: int, end_ns: int) -> dict[str, float]:
    seconds = (end_ns - begin_ns) / 1e9
    rates = {"total": round(_output(outcomes, sizes) / seconds, 1) if seconds > 0 else 0.0}
    firsts: dict[int, int] = {}
    for seen in outcomes:
        if seen.times:
            firsts[seen.client] = min(firsts.get(seen.client, seen.times[0]), seen.times[0])
    opened = max(firsts.values(), default=idle_ns)
    window = (idle_ns - opened) / 1e9
    if window >= _SHORTEST_WINDOW_S and len(firsts) == len({o.client for o in outcomes}):
        inside = sum(
            size * sum(opened < t <= idle_ns for t in seen.times) for seen, size in zip(outcomes, sizes, strict=True)
        )
        rates |= {"steady": round(inside / window, 1), "steady_window_s": round(window, 2)}
    return rates


def _output(outcomes: list[Outcome], sizes: list[float]) -> float:
    """Tokens that arrived, those of failed and cut requests too."""
    return sum(
        size * len(seen.times) if seen.times else max(seen.tokens, 0)
        for seen, size in zip(outcomes, sizes, strict=True)
    )


def _gaps(outcomes: Iterable[Outcome], sizes: Iterable[float]) -> NDArray[np.float64]:
    """Milliseconds between events of the same stream, over what an event of that stream carries."""
    gaps = [np.diff(o.times) / _MS / size for o, size in zip(outcomes, sizes, strict=True) if o.times]
    return np.concatenate(gaps) if gaps else np.zeros(0)


def _tokens(whole: list[Outcome], outcomes: list[Outcome], sizes: list[float]) -> dict[str, Any]:
    """Counts of the requests that are complete; `output`, `events_with_text` and the prompts' are of all."""
    by_usage = sum(o.tokens for o in whole if o.tokens >= 0)
    in_events = sum(len(o.times) for o in whole)
    return {
        "asked": sum(o.asked for o in whole),
        "by_usage": by_usage,
        "without_usage": sum(o.tokens < 0 for o in whole),
        "equal": all(o.tokens == o.asked for o in whole),
        "events_with_text": sum(len(o.times) for o in outcomes),
        "output": round(_output(outcomes, sizes)),
        "per_event": round(by_usage / in_events, 3) if in_events else 0.0,
        "prompt": sum(o.prompt_tokens for o in outcomes),
        "prompt_cached": sum(o.cached_tokens for o in outcomes),
    }


def _turn(turn: int, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "turn": turn,
        "prompt_tokens": round(float(np.mean([o.prompt_tokens for o in outcomes])), 1),
        "cached_tokens": round(float(np.mean([o.cached_tokens for o in outcomes])), 1),
        "ttft_ms": quantiles([(o.times[0] - o.due_ns) / _MS for o in outcomes if o.times]),
    }
