"""The public identity of an answer and what the log knows of its request."""

from __future__ import annotations

import time
import uuid
from typing import Any, TypedDict

from fastapi import Request

from inferserve.http.service import Limits


class Identity(TypedDict):
    """`id`, `created` (seconds of the epoch) and `model`, the same in all chunks of a stream."""

    id: str
    created: int
    model: str


def identify(request: Request, prefix: str, limits: Limits) -> tuple[Identity, dict[str, Any]]:
    """A new identity with `prefix`, and the `GenerateRequest` fields that name the request."""
    name = prefix + uuid.uuid4().hex
    state = request.state
    trace = {
        "name": name,
        "request_id": state.request_id,
        "session_id": state.session_id,
        "arrival_ns": state.arrival_ns,
    }
    return Identity(id=name, created=int(time.time()), model=limits.model), trace
