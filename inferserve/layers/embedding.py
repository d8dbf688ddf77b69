"""`Embedding` and `Head`: ids to vectors and vectors to logits; a tied head reads the embedding's matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from inferserve.layers.packed import packed, plain


class Embedding(nn.Module):
    """Table [vocab, size]."""

    def __init__(self, vocab: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Int64 [T] → [T, size]."""
        return functional.embedding(token_ids, self.weight)


class Head(nn.Module):
    """Logits. `weight` is [vocab, size], its own or the embedding's."""

    def __init__(self, vocab: int, size: int, tied: Embedding | None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = (
            tied.weight if tied else nn.Parameter(torch.empty(vocab, size), requires_grad=False)
        )
        self._matmul = plain(self.weight, None)

    def pack(self) -> None:
        """Lay the filled weight out for the device; see `Linear.pack`."""
        assert self.weight is not None
        matmul = packed(self.weight, None)
        if matmul is not None:
            self._matmul, self.weight = matmul, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, size] → [S, vocab], in the dtype of the weights."""
        return self._matmul(x)
