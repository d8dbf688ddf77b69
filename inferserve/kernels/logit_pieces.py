"""How the sampling kernels share out rows of logits, and their launch choices as frozen rows. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """Entries per tile, warps per program."""

    block: int
    warps: int


ARGMAX = TileConfig(block=4096, warps=8)
LOGPROBS = TileConfig(block=4096, warps=8)
PENALTIES = TileConfig(block=1024, warps=8)
FILTER = TileConfig(block=8192, warps=32)

PIECES = 32
"""Most pieces that a row is cut into."""

_PROGRAMS = 528
"""As many as keep an H200 busy: 132 multiprocessors, 4 programs each."""


def cut(rows: int, vocab: int, block: int) -> tuple[int, int]:
    """Pieces that each row of logits is cut into, and entries of a piece: whole tiles of `block`, but the last."""
    tiles = -(-vocab // block)
    wanted = min(PIECES, tiles, max(1, _PROGRAMS // rows))
    piece = -(-tiles // wanted)
    return -(-tiles // piece), piece * block
