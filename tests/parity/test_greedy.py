"""Greedy tokens equal transformers' generate, 20 prompts x 64, however the engine batches, chunks, shares and pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.driver import Driver
from tests.parity.tiny import BY_NAME, NEW_TOKENS, Oracle


@pytest.mark.parametrize("name", list(BY_NAME))
def test_greedy(oracle: Callable[[str], Oracle], driver: Callable[..., Driver], name: str) -> None:
    truth = oracle(name)
    plain = driver(name, prefix_cache=False, chunk=1000)
    assert plain.generate(truth.prompts[:4], NEW_TOKENS, batch=1) == list(truth.answers[:4])
    rough = driver(name, prefix_cache=True, chunk=7)
    assert rough.generate(truth.prompts, NEW_TOKENS, batch=8, pause_every=13) == list(truth.answers)
    assert rough.hits > 0
    before = rough.hits
    assert rough.generate(truth.prompts[::-1], NEW_TOKENS, batch=3) == list(truth.answers[::-1])
    assert rough.hits - before >= sum(len(p) - 1 for p in truth.prompts)
