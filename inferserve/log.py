"""Logging: one line a fact, `key=value` fields, or JSON lines. Knows nothing of processes.

`setup()` is called once by each process; everything else is `logging.getLogger(__name__)`. Fields go in
`extra={"fields": {...}}`, for which `event()` is the short way.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _visible(text: str) -> str:
    """`text` with everything that could steer a terminal or fake a line (controls, separators, bidi) as JSON escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _plain(value: object) -> str:
    """One `value` of a key=value field: quoted when it holds a space, control characters escaped."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text):
        return text
    return _visible(json.dumps(text, ensure_ascii=False))


def _strict(value: object) -> object:
    """`value`, or its text where JSON has no word for it (NaN, infinities)."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class KeyValueFormatter(logging.Formatter):
    """`12:00:00.123 INFO router message key=value …`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        tail = "".join(f" {k}={_plain(v)}" for k, v in fields.items())
        message = _visible(record.getMessage())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {self._process:<12} {message}{tail}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, process, msg and the fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "msg": record.getMessage(),
        }
        body.update({key: _strict(value) for key, value in getattr(record, "fields", {}).items()})
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


def setup(process: str, level: str = "info", fmt: str = "text") -> None:
    """Send this process's log to stderr.

    Args:
        process: the name shown in each line, such as `router` or `http-0`.
        level: debug, info, warning or error.
        fmt: `text` (key=value) or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if fmt == "json" else KeyValueFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("inferserve").setLevel(_LEVELS[level])


def event(logger: logging.Logger, message: str, level: int = logging.INFO, /, **fields: object) -> None:
    """Log `message` with fields, e.g. `event(log, "weights loaded", seconds=1.2)`."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, extra={"fields": fields})
