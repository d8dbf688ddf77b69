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
    tensor = torch.from_numpy(np.array(array, order="C"))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
