"""What a load generator sends: the workloads, as requests drawn from a seed. Knows no sockets and no clock.

Prompts are token ids, or text made of words that are one token each in the made tokenizer of `--load-format dummy`
(other tokenizers cut them into more; the server's own count is in the report).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

WORKLOADS = ("fixed", "random", "shared-prefix", "multi-turn", "bursty")
_SYLLABLES = [c + v for c, v in product("bcdfghjklmnpqrstvwxyz", "aeiou")]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what is sent.

    Attributes:
        clients: closed loop: how many wait for one answer each.
        requests, duration_s: when it ends: after so many, after so long, or whichever comes first; 0 = no such limit.
        input_len, output_len: tokens; of `random` and `bursty` with `spread` the largest.
        spread: smallest length ÷ largest, drawn uniformly between; 1 = fixed.
        prefix_len: tokens at the start of every prompt that all share.
        turns: of a conversation; each later turn has `input_len` new tokens behind all that was said.
        only_new: conversations forget: each turn is a prompt of its new tokens alone.
        rate: bursty: requests a second.
        burstiness: bursty: shape of the gamma distribution of the gaps; 1 = Poisson, less = burstier.
        text: prompts are text, not ids.
        ids: token ids are drawn from [first, last).
        extra: further fields of the body.
    """

    workload: str
    model: str
    clients: int
    requests: int
    duration_s: float
    input_len: int
    output_len: int
    spread: float
    prefix_len: int
    turns: int
    only_new: bool
    rate: float
    burstiness: float
    text: bool
    stream: bool
    ids: tuple[int, int]
    seed: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One request. `wait_s` is the gap before it, for open loops."""

    body: dict[str, Any]
    asked: int
    turn: int = 0
    wait_s: float = 0.0


class Drawer:
    """Draws the requests of one client (or of one open loop).

    Args:
        plan: what to draw.
        stream: which client; each has random numbers of its own, so runs are repeatable for any number of processes.
    """

    def __init__(self, plan: Plan, stream: int) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed * 1_000_003 + stream)
        shared = random.Random(plan.seed)
        self._prefix = _draw(plan, shared, plan.prefix_len)
        self._history: list[Any] = []

    def jobs(self) -> Iterator[Job]:
        """Independent requests without end."""
        plan = self._plan
        while True:
            prompt = self._prefix + _draw(plan, self._random, self._length(plan.input_len))
            wait = 0.0
            if plan.workload == "bursty":
                wait = self._random.gammavariate(plan.burstiness, 1.0 / (plan.burstiness * plan.rate))
            yield self._job(prompt, self._length(plan.output_len), 0, wait)

    def turn(self, number: int, said: str) -> Job:
        """Turn `number` of a conversation, whose last answer was `said`."""
        plan = self._plan
        new = _draw(plan, self._random, plan.input_len)
        if number == 0:
            self._history = list(self._prefix)
        elif said:
            self._history.append(said)
        self._history += new
        return self._job(new if plan.only_new and number else self._history, plan.output_len, number, 0.0)

    def _length(self, largest: int) -> int:
        plan = self._plan
        return largest if plan.spread >= 1 else self._random.randint(max(1, round(plan.spread * largest)), largest)

    def _job(self, prompt: list[Any], asked: int, turn: int, wait_s: float) -> Job:
        plan = self._plan
        body: dict[str, Any] = {
            "model": plan.model,
            "prompt": "".join(prompt) if plan.text else prompt,
            "max_tokens": asked,
            "temperature": 0,
            "ignore_eos": True,
        }
        if plan.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Job(body | plan.extra, asked, turn, wait_s)


def _draw(plan: Plan, source: random.Random, count: int) -> list[Any]:
    """`count` token ids, or as many words of one token."""
    if not plan.text:
        first, last = plan.ids
        return [first + int(source.random() * (last - first)) for _ in range(count)]
    return [" " + source.choice(_SYLLABLES) + source.choice(_SYLLABLES) for _ in range(count)]
