"""Kernels run on the GPU where there is one, else under Triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
