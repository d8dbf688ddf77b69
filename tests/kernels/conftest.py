"""Kernels run on the GPU where there is one, else under Triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def scalars_are_indexes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton 3.6's interpreter makes loop bounds with int(one-element array), which NumPy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    yield


@pytest.fixture(autouse=True)
def fp8_casts_are_right(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton 3.6's interpreter loses the carry when it rounds to e4m3, and wraps instead of saturating as GPUs do."""
    original = interpreter._convert_float

    def patched(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return original(values, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448.0, 448.0)
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", patched)
    yield
