"""`Sampler` against a naive sampler that looks at one row at a time, and each parameter's own promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from inferserve.kernels.logprobs import LOWEST_LOGPROB
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler
from inferserve.sampling.uniform import streams, uniform

VOCAB, EOS, LONGEST = 211, (3, 5), 1000
NO_TOKENS = np.zeros(0, np.int32)


def make(max_rows: int = 16, vocab: int = VOCAB) -> Sampler:
    return Sampler(max_rows, LONGEST, vocab, torch.device("cpu"), EOS)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def naive_logits(logits: torch.Tensor, params: SamplingParams, prompt: np.ndarray, output: list[int]) -> torch.Tensor:
    """Bias, penalties and mask, one token at a time, in float64."""
    row = logits.double().clone()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in {*prompt.tolist(), *output}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        row[[*EOS, *params.stop_token_ids]] = -math.inf
    return row


def naive_token(logits: torch.Tensor, params: SamplingParams, prompt: np.ndarray, output: list[int]) -> int:
    row = naive_logits(logits, params, prompt, output)
    if params.greedy:
        return int(row.argmax())
    p = torch.softmax(row / params.temperature, 0)
    if params.top_k > 0:
        p[p < p.sort(descending=True).values[min(params.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    if params.top_p < 1:
        values = p.sort(descending=True).values
        last = int((values.cumsum(0) < np.float32(params.top_p)).sum())
        p[p < values[min(last, len(p) - 1)]] = 0
    p[p < params.min_p * p.max()] = 0
    u = float(uniform(streams(np.array([params.seed], np.uint64)), ints(len(output)))[0])
    running = p.cumsum(0)
    return int((running <= u * running[-1]).sum())


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 7},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 1.0, "repetition_penalty": 0.8, "frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"temperature": 0.0, "logit_bias": {7: 50.0, 9: -100.0}},
    {"temperature": 1.0, "logit_bias": {3: 100.0}, "min_tokens": 4, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": (11, 12), "logit_bias": {11: 30.0}},
]


def params_list(seed: int = 0) -> list[SamplingParams]:
    return [SamplingParams(seed=1000 * seed + i, max_tokens=100, **p) for i, p in enumerate(PARAMS)]


def prompt_of(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, VOCAB, 5 * row, dtype=np.int32)


def test_equals_the_naive_sampler_over_many_steps() -> None:
    sampler, every = make(), params_list()
    outputs: list[list[int]] = [[] for _ in every]
    for row, params in enumerate(every):
        sampler.open_row(row, params, prompt_of(row), NO_TOKENS)
    order = np.random.default_rng(0)
    for step in range(12):
        rows = order.permutation(len(every)).astype(np.int32)
        logits = logits_of(len(every), step)
        expected = [naive_token(logits[i], every[r], prompt_of(r), outputs[r]) for i, r in enumerate(rows)]
        sampled = sampler.sample(logits, rows, ints(*(len(outputs[r]) for r in rows)))
        assert sampled.token_ids.tolist() == expected
        assert not sampled.failed.any()
        for token, row in zip(expected, rows, strict=True):
            outputs[row].append(token)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = logits_of(len(PARAMS), 5)
    together, tokens = make(), []
    for row, params in enumerate(params_list()):
        together.open_row(row, params, prompt_of(row), NO_TOKENS)
        alone = make()
        alone.open_row(9, params, prompt_of(row), NO_TOKENS)
        tokens.append(int(alone.sample(logits[row : row + 1], ints(9), ints(0)).token_ids))
    rows = np.arange(len(PARAMS), dtype=np.int32)
    assert together.sample(logits, rows, np.zeros_like(rows)).token_ids.tolist() == tokens


def test_logits_are_not_changed() -> None:
    sampler, logits = make(), logits_of(len(PARAMS))
    before = logits.clone()
    for row, params in enumerate(params_list()):
        sampler.open_row(row, params, prompt_of(row), ints(1, 2, 1))
    rows = np.arange(len(PARAMS), dtype=np.int32)
    sampler.sample(logits, rows, rows * 0 + 3)
    assert torch.equal(logits, before)


def test_resume_restores_penalties_and_randomness() -> None:
    """A paused row, opened again with what it had said, goes on as if nothing had happened."""
    straight, paused = make(), make()
    every = params_list(seed=3)
    outputs: list[list[int]] = [[] for _ in every]
    rows = np.arange(len(every), dtype=np.int32)
    for row, params in enumerate(every):
        straight.open_row(row, params, prompt_of(row), NO_TOKENS)
    for step in range(8):
        logits = logits_of(len(every), 100 + step)
        expected = straight.sample(logits, rows, rows * 0 + step).token_ids.tolist()
        for row, params in enumerate(every):
            paused.open_row(row, params, prompt_of(row), ints(*outputs[row]))
        assert paused.sample(logits, rows, rows * 0 + step).token_ids.tolist() == expected
        for row in rows:
            paused.close_row(row)
            outputs[row].append(expected[row])


def test_histories_grow_past_their_first_size() -> None:
    sampler = make(64)
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=0.5)
    long = np.random.default_rng(1).integers(0, VOCAB, 700, dtype=np.int32)
    rows = np.arange(20, dtype=np.int32)
    for row in rows:
        sampler.open_row(row, params, NO_TOKENS, long[: 35 * row])
    outputs = [long[: 35 * row].tolist() for row in rows]
    for step in range(3):
        logits = logits_of(20, step)
        expected = [naive_token(logits[r], params, NO_TOKENS, outputs[r]) for r in rows]
        assert sampler.sample(logits, rows, rows * 35 + step).token_ids.tolist() == expected
        for row in rows:
            outputs[row].append(expected[row])


def test_rows_may_be_opened_in_any_mode_after_histories_have_grown() -> None:
    """Torch refuses to change, outside inference mode, a tensor that was made in it."""
    sampler = make()
    params = SamplingParams(temperature=0.0, presence_penalty=0.1)
    sampler.open_row(0, params, NO_TOKENS, np.zeros(255, np.int32))
    with torch.inference_mode():
        for position in (255, 256, 257):
            sampler.sample(logits_of(1), ints(0), ints(position))
    sampler.open_row(1, params, NO_TOKENS, ints(4))
    best = int(logits_of(1).argmax())
    sampler.open_row(2, params, NO_TOKENS, np.full(600, best, np.int32))
    assert sampler.sample(logits_of(1).expand(2, -1), ints(1, 0), ints(1, 258)).token_ids.tolist() == [best, best]


def test_histories_take_no_more_than_the_longest_sequences_need() -> None:
    sampler = make(max_rows=11)
    params = SamplingParams(temperature=0.0, presence_penalty=0.1)
    for row in range(11):
        sampler.open_row(row, params, NO_TOKENS, np.zeros(520, np.int32))
    for position in range(520, LONGEST):
        sampler.sample(logits_of(1), ints(3), ints(position))
    assert sampler._penalties._history.shape == (11, LONGEST)


def test_close_frees_the_row_for_another_sequence() -> None:
    sampler, logits = make(2), logits_of(1)
    best = int(logits.argmax())
    for _ in range(50):
        sampler.open_row(0, SamplingParams(temperature=0.0, presence_penalty=2.0), ints(best), ints(best))
        sampler.sample(logits, ints(0), ints(1))
        sampler.close_row(0)
    sampler.open_row(0, SamplingParams(temperature=0.0), NO_TOKENS, NO_TOKENS)
    assert int(sampler.sample(logits, ints(0), ints(0)).token_ids) == best


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_makes_no_sense_fails_alone(bad: float) -> None:
    every = params_list()
    rows = np.arange(len(every), dtype=np.int32)
    logits = logits_of(len(every))
    clean = make()
    for row, params in enumerate(every):
        clean.open_row(row, params, prompt_of(row), NO_TOKENS)
    expected = clean.sample(logits, rows, rows * 0).token_ids
    for victim in rows:
        sampler = make()
        for row, params in enumerate(every):
            sampler.open_row(row, params, prompt_of(row), NO_TOKENS)
        poisoned = logits.clone()
        poisoned[victim, 17] = bad
        sampled = sampler.sample(poisoned, rows, rows * 0)
        assert sampled.failed.nonzero().flatten().tolist() == [victim]
        others = rows != victim
        assert torch.equal(sampled.token_ids[others], expected[others])
        assert 0 <= sampled.token_ids[victim] < VOCAB


def test_a_row_of_impossible_tokens_fails_but_some_impossible_tokens_do_not() -> None:
    sampler = make()
    for row, temperature in enumerate((0.0, 1.0, 0.0, 1.0)):
        sampler.open_row(row, SamplingParams(temperature=temperature, seed=row), NO_TOKENS, NO_TOKENS)
    logits = torch.full((4, VOCAB), -math.inf)
    logits[2:, 40] = 1.0
    sampled = sampler.sample(logits, ints(0, 1, 2, 3), ints(0, 0, 0, 0))
    assert sampled.failed.tolist() == [True, True, False, False]
    assert sampled.token_ids[2:].tolist() == [40, 40]


def test_min_tokens_masks_every_ending_token_until_reached() -> None:
    sampler = make()
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(9,), max_tokens=9)
    sampler.open_row(0, params, NO_TOKENS, NO_TOKENS)
    logits = torch.zeros((1, VOCAB))
    logits[0, [3, 5, 9]] = torch.tensor([9.0, 8.0, 7.0])
    logits[0, 20] = 1.0
    tokens = [int(sampler.sample(logits, ints(0), ints(p)).token_ids) for p in range(4)]
    assert tokens == [20, 20, 3, 3]


def test_ids_outside_the_vocabulary_are_harmless() -> None:
    sampler = make()
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=2.0,
        min_tokens=3,
        max_tokens=9,
        logit_bias={VOCAB + 5: 100.0, -3: 100.0},
        stop_token_ids=(VOCAB, -1),
    )
    logits = logits_of(2)
    sampler.open_row(0, params, ints(-7, VOCAB + 1, 2**31 - 1), ints(VOCAB))
    sampler.open_row(1, SamplingParams(temperature=0.0, frequency_penalty=1.0), NO_TOKENS, ints(0))
    sampled = sampler.sample(logits, ints(0, 1), ints(1, 1))
    assert int(sampled.token_ids[0]) == naive_token(
        logits[0], SamplingParams(temperature=0.0, min_tokens=3), NO_TOKENS, [0]
    )
    assert int(sampled.token_ids[1]) == naive_token(
        logits[1], SamplingParams(temperature=0.0, frequency_penalty=1.0), NO_TOKENS, [0]
    )


def test_top_k_one_and_temperature_zero_are_argmax() -> None:
    sampler, logits = make(), logits_of(3)
    for row, params in enumerate(({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6})):
        sampler.open_row(row, SamplingParams(seed=row, **params), NO_TOKENS, NO_TOKENS)
    assert torch.equal(sampler.sample(logits, ints(0, 1, 2), ints(0, 0, 0)).token_ids, logits.argmax(-1))


@pytest.mark.parametrize(
    "params", [{"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 2, "top_p": 1e-4}, {"temperature": 1e-4}]
)
def test_tight_filters_leave_the_likeliest(params: dict[str, Any]) -> None:
    sampler, logits = make(), logits_of(1)
    for seed in range(30):
        sampler.open_row(0, SamplingParams(seed=seed, **params), NO_TOKENS, NO_TOKENS)
        assert int(sampler.sample(logits, ints(0), ints(0)).token_ids) == int(logits.argmax())


def test_tokens_that_tie_at_the_threshold_stay_together() -> None:
    sampler = make()
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [10, 20, 30]] = 2.0
    seen = set()
    for seed in range(60):
        sampler.open_row(0, SamplingParams(seed=seed, top_k=2), NO_TOKENS, NO_TOKENS)
        seen.add(int(sampler.sample(logits, ints(0), ints(0)).token_ids))
    assert seen == {10, 20, 30}


def test_logprobs_are_of_the_raw_logits() -> None:
    sampler, logits = make(), logits_of(4)
    common = {"temperature": 0.5, "presence_penalty": 2.0, "logit_bias": {8: 100.0}}
    for row, wanted in enumerate((None, 0, 3, 20)):
        sampler.open_row(row, SamplingParams(seed=row, logprobs=wanted, **common), NO_TOKENS, ints(4))
    sampled = sampler.sample(logits, ints(0, 1, 2, 3), ints(1, 1, 1, 1))
    truth = torch.log_softmax(logits.double(), -1)
    assert sampled.token_ids.tolist() == [8, 8, 8, 8]
    assert math.isnan(sampled.logprobs[0])
    torch.testing.assert_close(sampled.logprobs[1:].double(), truth[1:, 8], rtol=0, atol=1e-5)
    assert sampled.tops is not None
    assert (sampled.tops.index, sampled.tops.counts) == ((2, 3), (3, 20))
    values, ids = truth[2:].topk(20)
    assert torch.equal(sampled.tops.token_ids, ids)
    torch.testing.assert_close(sampled.tops.logprobs.double(), values, rtol=0, atol=1e-5)


def test_logprobs_are_finite_numbers() -> None:
    sampler = make()
    sampler.open_row(0, SamplingParams(temperature=0.0, logprobs=5, logit_bias={7: 100.0}), NO_TOKENS, NO_TOKENS)
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 2] = 1.0
    sampled = sampler.sample(logits, ints(0), ints(0))
    assert sampled.tops is not None
    assert sampled.tops.logprobs[0, 0] == 0.0
    assert (sampled.tops.logprobs[0, 1:] == LOWEST_LOGPROB).all()


def test_half_precision_logits() -> None:
    sampler, logits = make(), logits_of(len(PARAMS)).to(torch.bfloat16)
    exact = make()
    for row, params in enumerate(params_list()):
        for each in (sampler, exact):
            each.open_row(row, params, prompt_of(row), ints(1, 2))
    rows = np.arange(len(PARAMS), dtype=np.int32)
    expected = exact.sample(logits.float(), rows, rows * 0 + 2)
    assert torch.equal(sampler.sample(logits, rows, rows * 0 + 2).token_ids, expected.token_ids)


@pytest.mark.parametrize("top_p", [0.2, 0.7, 0.95, 0.9999])
def test_a_nucleus_of_thousands_of_tokens(top_p: float) -> None:
    vocab = 5000
    logits = torch.randn((1, vocab), generator=torch.Generator().manual_seed(1)) * 0.5
    sampler = make(vocab=vocab)
    for seed in range(40):
        params = SamplingParams(seed=seed, top_p=top_p)
        sampler.open_row(0, params, NO_TOKENS, NO_TOKENS)
        token = int(sampler.sample(logits, ints(0), ints(0)).token_ids)
        assert token == naive_token(logits[0], params, NO_TOKENS, [])


def test_a_step_may_sample_nothing() -> None:
    sampled = make().sample(torch.empty(0, VOCAB), NO_TOKENS, NO_TOKENS)
    assert sampled.token_ids.shape == sampled.logprobs.shape == sampled.failed.shape == (0,)
    assert sampled.tops is None


def test_a_closed_row_is_plain_greedy() -> None:
    """Under one step ahead a step may still name a row whose sequence has just left."""
    sampler, logits = make(), logits_of(1)
    sampler.open_row(0, params_list()[8], prompt_of(5), ints(1))
    sampler.close_row(0)
    assert int(sampler.sample(logits, ints(0), ints(1)).token_ids) == int(logits.argmax())


def test_a_row_that_is_taken_over_has_nothing_of_its_predecessor() -> None:
    """Bias, mask and penalties of the same rows are sent to the device once; a new sequence brings its own."""
    sampler, logits = make(2), logits_of(2)
    order = logits.argsort(dim=-1, descending=True)
    best, second = order[:, 0].tolist(), order[:, 1].tolist()
    for row in range(2):
        params = SamplingParams(temperature=0.0, logit_bias={best[row]: -100.0}, min_tokens=9, max_tokens=9)
        sampler.open_row(row, params, NO_TOKENS, NO_TOKENS)
    for _ in range(2):
        assert sampler.sample(logits, ints(0, 1), ints(0, 0)).token_ids.tolist() == second
    params = SamplingParams(temperature=0.0, logit_bias={second[0]: 100.0}, min_tokens=9, max_tokens=9)
    sampler.open_row(0, params, NO_TOKENS, NO_TOKENS)
    sampler.open_row(1, SamplingParams(temperature=0.0, logit_bias={0: 0.0}), NO_TOKENS, NO_TOKENS)
    assert sampler.sample(logits, ints(0, 1), ints(0, 0)).token_ids.tolist() == [second[0], best[1]]
    assert sampler.sample(logits.flip(0), ints(1, 0), ints(0, 0)).token_ids.tolist() == [best[1], second[0]]
