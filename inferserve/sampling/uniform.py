"""Random numbers of a row as a function of its seed and output position, and of nothing else.

Counter-based: there is no state to save, resume, or share between rows, so neither pausing a row nor its neighbours
can change its text. The same finaliser as `protocol.seeds` has for single numbers, here over arrays of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int32]) -> NDArray[np.float32]:
    """One number in [0, 1) a row, a multiple of 2^-24.

    Args:
        seed: uint64 [S].
        position: int32 [S], output positions, >= 0.

    Returns: float32 [S].
    """
    counter = (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(_mix(seed + _GOLDEN) + counter)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
