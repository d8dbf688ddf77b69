"""Draws follow the distribution they should: chi-square over fixed seeds, and uniform numbers that look uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler
from inferserve.sampling.uniform import streams, uniform

DRAWS = 4096


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Normalised: about N(0, 1) if counts follow p."""
    expected = p * counts.sum()
    kept = expected > 5
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * max(freedom, 1)))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 20},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_filtered_softmax(params: dict[str, Any], vary: str) -> None:
    vocab = 64
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 1.5
    sampler = Sampler(DRAWS, 64, vocab, torch.device("cpu"), ())
    empty = np.zeros(0, np.int32)
    rows = np.arange(DRAWS, dtype=np.int32)
    for row in rows.tolist():
        sampler.open_row(row, SamplingParams(seed=row if vary == "seed" else 5, **params), empty, empty)
    positions = rows if vary == "position" else rows * 0
    tokens = sampler.sample(logits.expand(DRAWS, -1), rows, positions).token_ids.numpy()

    p = torch.softmax(logits.double() / params.get("temperature", 1.0), 0)
    ranked = p.sort(descending=True).values
    floor = float(params.get("min_p", 0.0) * ranked[0])
    k = params.get("top_k", vocab)
    floor = max(floor, float(ranked[k - 1]))
    mass = ranked[:k].cumsum(0) / ranked[:k].sum()
    floor = max(floor, float(ranked[int((mass < params.get("top_p", 1.0)).sum().clamp(max=k - 1))]))
    p[p < floor] = 0
    p = (p / p.sum()).numpy()
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[p == 0].sum() == 0
    assert abs(chi_square(counts, p)) < 4


def test_uniform_is_uniform_over_seeds_and_positions() -> None:
    seeds = np.arange(200, dtype=np.uint64)[:, None]
    positions = np.arange(200, dtype=np.int32)[None, :]
    u = uniform(streams(np.broadcast_to(seeds, (200, 200))), np.broadcast_to(positions, (200, 200)))
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(chi_square(np.histogram(u, 64, (0, 1))[0], np.full(64, 1 / 64))) < 4
    for axis in (0, 1):
        centred = u - u.mean()
        correlation = (centred * np.roll(centred, 1, axis)).mean() / centred.var()
        assert abs(correlation) < 0.02
    assert len(np.unique(u)) > 39_000


def test_uniform_is_a_pure_function_that_does_not_change_between_versions() -> None:
    seed = np.array([0, 1, 2**63 - 1], np.uint64)
    position = np.array([0, 1, 2**31 - 1], np.int32)
    together = uniform(streams(seed), position).tolist()
    assert [float(uniform(streams(seed[i : i + 1]), position[i : i + 1])[0]) for i in range(3)] == together
    assert together == [0.6524484753608704, 0.9435641765594482, 0.2594982981681824]
