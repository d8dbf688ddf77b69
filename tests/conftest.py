"""Fixtures of all tests: where the demo model is, and the rule that no test may unpickle anything."""

from __future__ import annotations

import pickle
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pickle` is not a wire or file format here. (torch's own compile cache and hypothesis are not under test.)"""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something tried to unpickle")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
