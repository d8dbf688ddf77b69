"""Chained granule digests: equal exactly for equal prefixes."""

from __future__ import annotations

import numpy as np

from inferserve.protocol.digests import DIGEST_BYTES, GRANULE, granule_digests


def test_only_full_granules_have_a_digest() -> None:
    tokens = np.arange(2 * GRANULE + 255, dtype=np.int32)
    assert granule_digests(tokens[: GRANULE - 1]) == []
    digests = granule_digests(tokens)
    assert len(digests) == 2 and all(len(d) == DIGEST_BYTES for d in digests)


def test_a_digest_names_the_whole_prefix() -> None:
    tokens = np.arange(3 * GRANULE, dtype=np.int32)
    digests = granule_digests(tokens)
    other = tokens.copy()
    other[0] += 1
    assert not set(granule_digests(other)) & set(digests)
    other = tokens.copy()
    other[-1] += 1
    assert granule_digests(other)[:2] == digests[:2] and granule_digests(other)[2] != digests[2]


def test_continuing_from_a_parent_equals_one_pass() -> None:
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 4 * GRANULE).astype(np.int32)
    digests = granule_digests(tokens)
    assert granule_digests(tokens[GRANULE:], parent=digests[0]) == digests[1:]
    assert granule_digests(tokens[::-1][::-1]) == digests
