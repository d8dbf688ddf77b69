"""Seeds: one finaliser that scatters 64-bit integers, and the seeds of the siblings of a request. Draws nothing itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sibling_seed(seed: int, number: int) -> int:
    """The seed of sibling `number`, 0..2^63-1; sibling 0 keeps `seed`."""
    if number == 0:
        return seed
    return int(mix(np.array([seed], np.uint64) + np.array([number], np.uint64) * GOLDEN)[0]) >> 1
