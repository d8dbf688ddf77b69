"""`Embedding` and `Head`: ids to vectors and vectors to logits; a tied head reads the embedding's matrix.

Several ranks hold a part of the vocabulary each, the last one padded to the size of the others.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from inferserve.layers.packed import in_order, packed, plain
from inferserve.parallel.ranks import ALONE, Ranks


class Embedding(nn.Module):
    """Table [vocab / ranks, size]."""

    def __init__(self, vocab: int, size: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._ranks = ranks
        self.weight = nn.Parameter(torch.empty(_part(vocab, ranks), size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 [T] → [T, size]."""
        if self._ranks.size == 1:
            return functional.embedding(token_ids, self.weight)
        held = self.weight.shape[0]
        own = token_ids - self._ranks.rank * held
        others = (own < 0) | (own >= held)
        vectors = functional.embedding(own.clamp(0, held - 1), self.weight)
        return self._ranks.sum(vectors.masked_fill_(others[:, None], 0))


class Head(nn.Module):
    """Logits. `weight` is [vocab / ranks, size], its own or the embedding's."""

    def __init__(self, vocab: int, size: int, tied: Embedding | None, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._vocab = vocab
        self._ranks = ranks
        self.weight: nn.Parameter | None = (
            tied.weight if tied else nn.Parameter(torch.empty(_part(vocab, ranks), size), requires_grad=False)
        )
        self._matmul = plain(self.weight, None)

    def pack(self, ordered: bool = False) -> None:
        """Lay the filled weight out for the device; see `Linear.pack`."""
        assert self.weight is not None
        if ordered:
            self._matmul = in_order(self.weight, None)
            return
        matmul = packed(self.weight, None)
        if matmul is not None:
            self._matmul, self.weight = matmul, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, size] → [S, vocab], in the dtype of the weights."""
        logits = self._matmul(x)
        if self._ranks.size == 1:
            return logits
        *full, last = self._ranks.gather(logits)
        return torch.cat((*full, last[:, : self._vocab - logits.shape[1] * len(full)]), dim=1)


def _part(vocab: int, ranks: Ranks) -> int:
    return -(-vocab // ranks.size)
