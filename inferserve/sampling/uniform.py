"""Random numbers of a row as a function of its seed and output position, and of nothing else.

Counter-based: there is no state to save, resume, or share between rows, so neither pausing a row nor its neighbours
can change its text. The finaliser is SplitMix64's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferserve.protocol.seeds import GOLDEN, mix


def streams(seed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What `uniform` needs of a row's seed; uint64 [S] both."""
    return mix(seed + GOLDEN)


def uniform(stream: NDArray[np.uint64], position: NDArray[np.int32]) -> NDArray[np.float32]:
    """One number in [0, 1) a row, a multiple of 2^-24.

    Args:
        stream: uint64 [S], of the rows' seeds.
        position: int32 [S], output positions, >= 0.

    Returns: float32 [S].
    """
    counter = (position.astype(np.uint64) + np.uint64(1)) * GOLDEN
    bits = mix(stream + counter)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
