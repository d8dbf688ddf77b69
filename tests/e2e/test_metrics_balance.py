"""After any mixture of endings the books balance: every request ended in exactly one way, every token was counted once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter

import httpx

from inferserve.metrics.client import PUSH_INTERVAL_S
from tests.e2e.requests import CHAT, COMPLETIONS, Body
from tests.e2e.server import RunningServer

REQUESTS = 240


def make(chance: random.Random) -> tuple[str, Body, float | None]:
    """A path, a body, and after how many seconds the client goes away (None: it stays)."""
    kind = chance.random()
    body: Body = {"max_tokens": chance.choice([1, 2, 30, 200]), "stream": chance.random() < 0.5, "seed": 1}
    body["n"] = chance.choice([1, 1, 1, 3])
    if chance.random() < 0.3:
        body["stop"] = ["e", "a"]
    if kind < 0.05:
        body["temperature"] = 9
    elif kind < 0.1:
        body["model"] = "unknown"
    elif kind < 0.15:
        body["max_tokens"] = 100_000
    path = chance.choice([CHAT, COMPLETIONS])
    words = " ".join(chance.choice(["count", "me", "once", "twice"]) for _ in range(chance.choice([1, 20, 150])))
    body |= {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    return path, body, chance.choice([None, None, 0.0, 0.01, 0.1])


async def play(client: httpx.AsyncClient, chance: random.Random, seen: Counter[int]) -> None:
    path, body, leaves_after = make(chance)
    await asyncio.sleep(chance.random() * 2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(leaves_after):
            answer = await client.post(path, json=body)
            seen[answer.status_code] += 1


async def crowd(url: str) -> Counter[int]:
    chance, seen = random.Random(7), Counter[int]()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=REQUESTS)) as client:
        await asyncio.gather(*[play(client, chance, seen) for _ in range(REQUESTS)])
    return seen


def leave_in_the_middle(server: RunningServer) -> None:
    """One abort for certain: in the crowd, whether a client leaves after its request was read depends on the machine."""
    body: Body = {"prompt": "on and on", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_lines())


def test_books_balance() -> None:
    flags = ("--running-max-req-size", "8", "--max-queued-requests", "24", "--fake-kv-tokens", "1500")
    with RunningServer("--engine", "fake", "--fake-step-ms", "3", "--httpserver-workers", "2", *flags) as server:
        seen = asyncio.run(crowd(server.url))
        leave_in_the_middle(server)
        assert set(seen) <= {200, 400, 404, 429}
        assert min(seen[200], seen[400], seen[404], seen[429]) > 0, seen
        server.wait_until_idle(5)
        time.sleep(2 * PUSH_INTERVAL_S)  # the worker that does not serve the page pushes when it pushes
        page = server.metrics()

        def total(name: str, *parts: str) -> float:
            found = [
                v for k, v in page.items() if k.split("{")[0] == f"inferserve_{name}" and all(p in k for p in parts)
            ]
            assert found, name
            return sum(found)

        ended, refused = total("request_success_total"), total("request_failure_total")
        assert total("request_failure_total", 'reason="error"') == 0
        assert total("request_failure_total", 'reason="invalid"') >= seen[400] + seen[404]
        assert total("request_failure_total", 'reason="overloaded"') >= seen[429]
        assert total("request_count_total") == ended + refused
        assert total("request_success_total", 'reason="stop"') > 0
        assert total("request_success_total", 'reason="abort"') > 0
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n", "request_duration"):
            assert total(f"{name}_count") == ended, name
        started = total("time_to_first_token_seconds_count")
        assert seen[200] <= started <= total("request_queue_time_seconds_count") <= ended
        assert total("request_generation_tokens_sum") == total("generation_tokens_total")
        assert total("prompt_tokens_total") == total("prompt_tokens_by_source_total")
        assert total("request_prefill_kv_computed_tokens_sum") + total("cache_length_sum") == total(
            "prompt_tokens_total"
        )


def test_a_prompt_that_has_not_begun_waits() -> None:
    """The router hands the engine more prompts than it begins at once; for a user, and his metrics, those still wait."""
    flags = ("--fake-step-ms", "20", "--batch-max-tokens", "64", "--chunked-prefill-size", "64")
    body: Body = {"prompt": [[5 + i] * 64 for i in range(30)], "max_tokens": 2}
    with RunningServer("--engine", "fake", *flags) as server, server.client() as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200
        time.sleep(2 * PUSH_INTERVAL_S)
        queued, filled = (server.metric(f"request_{phase}_time_seconds_sum") for phase in ("queue", "prefill"))
    assert queued > 4 * filled
