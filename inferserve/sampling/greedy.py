"""The likeliest token of each row, and whether the row's logits make sense at all."""

from __future__ import annotations

import torch


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index of the largest entry of each row, and that entry (NaN if the row holds one).

    Args:
        logits: [S, V] float.

    Returns: int64 [S]; [S] of the logits' dtype.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # NumPy's argmax is vectorised and stops at NaN; torch's on the CPU is neither (7 times slower at 8 x 49152).
        ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return ids, logits.gather(1, ids[:, None])[:, 0]
    peak, ids = logits.max(dim=-1)
    return ids, peak
