"""Digests of token prefixes, so that engine and router can name a cached prefix without sending its tokens.

A prefix is cut into granules of 256 tokens; a granule's digest covers its tokens and its parent's digest, so equal
digests mean equal prefixes from position 0 on. Knows nothing of what is cached where.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

GRANULE = 256
DIGEST_BYTES = 16


def granule_digests(tokens: NDArray[np.int32], parent: bytes = b"") -> list[bytes]:
    """Chained digests of the full granules of `tokens`; a rest shorter than a granule has none.

    Args:
        tokens: int32 ids; `tokens[0]` follows directly on the granule whose digest is `parent`.
        parent: digest (16 bytes) of the granule before, b"" when `tokens` starts at position 0.

    Returns:
        One digest of 16 bytes for each full granule: blake2b(parent ‖ little-endian int32 ids).
    """
    whole = len(tokens) // GRANULE * GRANULE
    data = memoryview(tokens[:whole].astype("<i4", copy=False).tobytes())
    digests = []
    for start in range(0, len(data), 4 * GRANULE):
        digest = blake2b(parent, digest_size=DIGEST_BYTES)
        digest.update(data[start : start + 4 * GRANULE])
        parent = digest.digest()
        digests.append(parent)
    return digests
