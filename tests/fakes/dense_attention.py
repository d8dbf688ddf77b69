"""A dense attention kernel in plain torch, as `inferserve.attention.dense` wants one."""

from __future__ import annotations

import torch


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `DenseOp` in plain torch."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score = q.float() @ k.transpose(2, 3) * scale
    if causal:
        assert score.shape[2] == score.shape[3]
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    out = (score.softmax(-1) @ v).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), score.logsumexp(-1, keepdim=True)
