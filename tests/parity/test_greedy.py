"""Greedy tokens equal transformers' generate, 20 prompts x 64, however the engine batches, chunks, shares and pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.driver import Driver
from tests.parity.tiny import BY_NAME, NEW_TOKENS, Oracle, greedy, is_greedy


@pytest.mark.parametrize("name", list(BY_NAME))
def test_greedy(oracle: Callable[[str], Oracle], driver: Callable[..., Driver], name: str) -> None:
    truth = oracle(name)
    rough = driver(name, prefix_cache=True, chunk=7)
    answers = rough.generate(truth.prompts, NEW_TOKENS, batch=8, pause_every=13)
    for prompt, answer in zip(truth.prompts, answers, strict=True):
        assert len(answer) == NEW_TOKENS
        assert is_greedy(truth.model, prompt, answer)
    assert answers[0] == greedy(truth.model, truth.prompts[0])
    assert rough.hits > 0

    for batch in range(2, 8):
        before = rough.hits
        assert rough.generate(truth.prompts[::-1], NEW_TOKENS, batch=batch) == answers[::-1]
        assert rough.hits - before >= sum(len(p) - 1 for p in truth.prompts)

    plain = driver(name, prefix_cache=False, chunk=1000)
    assert plain.generate(truth.prompts, NEW_TOKENS, batch=1) == answers
    assert plain.hits == 0


def test_the_check_can_fail(oracle: Callable[[str], Oracle]) -> None:
    truth = oracle("llama")
    answer = greedy(truth.model, truth.prompts[0])
    assert is_greedy(truth.model, truth.prompts[0], answer)
    for i in (0, 30, NEW_TOKENS - 1):
        wrong = (*answer[:i], (answer[i] + 1) % 256, *answer[i + 1 :])
        assert not is_greedy(truth.model, truth.prompts[0], wrong)
