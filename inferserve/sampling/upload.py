"""Small host arrays to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of `array` as a tensor on `device`.

    On CUDA it goes through pinned memory in stream order (torch keeps the pinned block until the copy is done).
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(array, order="C")).to(device)
    pinned = torch.empty(array.shape, dtype=_DTYPES[array.dtype], pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
