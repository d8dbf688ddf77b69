"""What a step takes, in milliseconds, predicted from what it holds; fitted to timed steps. Arithmetic, no torch, no clock.

A step costs a constant (weights are read once), its matrix products (rising with tokens, in tiles, ever steeper as they
stop being hidden behind the weights), the KV its decode rows read, the attention of its prompt chunks, and sampling. All
shares are non-negative, so a bad measurement cannot make a larger step look cheaper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

TILE = 64
"""Tokens that a tile of the matrix units takes."""

SIZES = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens that captured steps are made for: whole tiles, dense where padding would cost most."""

_KNOTS = (128, 256, 512)
"""Token counts at which the slope of the matrix products may rise."""


class StepCost(NamedTuple):
    """What the cost of a step depends on.

    Attributes:
        tokens: query tokens.
        kv: KV tokens that rows with one query token (or a draft) read.
        pairs: query tokens × context of the prompt chunks: what their attention computes.
        sampled: tokens sampled.
    """

    tokens: int
    kv: int
    pairs: float
    sampled: int


def padded(tokens: int) -> int:
    """What a step of `tokens` is padded to: the next of SIZES, beyond the last one to whole tiles."""
    at = bisect_left(SIZES, tokens)
    return SIZES[at] if at < len(SIZES) else -(-tokens // TILE) * TILE


def chunk_pairs(before: int, tokens: int) -> float:
    """`StepCost.pairs` of a chunk of `tokens` behind `before` tokens of the same row: causal, so half of its own square."""
    return tokens * (before + (tokens + 1) / 2)


def _features(step: StepCost) -> tuple[float, ...]:
    tokens = padded(step.tokens)
    hinges = (max(0, tokens - knot) for knot in _KNOTS)
    return (1.0, tokens, *hinges, step.kv, step.pairs, step.sampled)


@dataclass(frozen=True)
class CostModel:
    """Milliseconds as a weighted sum. `weights` belong to the features of a step, in order."""

    weights: tuple[float, ...]

    def milliseconds(self, step: StepCost) -> float:
        """Predicted time of a step."""
        return sum(w * f for w, f in zip(self.weights, _features(step), strict=True))


def fit(steps: Sequence[StepCost], milliseconds: Sequence[float]) -> CostModel:
    """The model that is nearest to the measured times, by the squares of the relative errors.

    Args:
        steps, milliseconds: parallel, at least one; times above 0.
    """
    times = np.asarray(milliseconds, dtype=np.float64)
    matrix = np.array([_features(step) for step in steps], dtype=np.float64) / times[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float64).tiny)
    weights = nnls(matrix / scale, np.ones(len(times))) / scale
    return CostModel(tuple(weights.tolist()))


def nnls(matrix: Doubles, target: Doubles) -> Doubles:
    """Non-negative x [n] that minimises |matrix x - target|: the active-set method of Lawson and Hanson (1974), ch. 23.

    Args:
        matrix: [m, n]. target: [m].
    """
    n = matrix.shape[1]
    x = np.zeros(n)
    free = np.zeros(n, dtype=np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(3 * n):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        x = _descend(matrix, target, x, free)
    return x


def _descend(matrix: Doubles, target: Doubles, x: Doubles, free: NDArray[np.bool_]) -> Doubles:
    """The least squares over the free variables, or as far towards it as none turns negative; `free` shrinks in place."""
    while True:
        solution = np.zeros(len(x))
        solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        blocking = free & (solution <= 0)
        if not blocking.any():
            return solution
        step = float((x[blocking] / np.maximum(x[blocking] - solution[blocking], 1e-300)).min())
        x = x + min(step, 1.0) * (solution - x)
        free &= x > 1e-15
        x[~free] = 0.0
