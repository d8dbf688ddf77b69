"""The one decoder of request bodies: JSON as RFC 8259 means it, with limits, and a 400 for everything else.

Refused: text that is not UTF-8 or begins with a BOM, NaN and Infinity, numbers beyond float64 or 64-bit integers,
duplicate keys, lone surrogates, nesting deeper than 32. Knows nothing of fields; that is the schemas' business.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from inferserve.errors import InvalidRequest

MAX_DEPTH = 32
MIN_INT = -(2**63)
MAX_INT = 2**64 - 1

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(body: bytes) -> Any:
    """The value of `body`. Raises InvalidRequest with code `invalid_json`."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise _refuse(f"not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _refuse(f"nested deeper than {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        raise _refuse(f"{error.msg} at character {error.pos}") from error
    except ValueError as error:  # int() refuses thousands of digits
        raise _refuse("a number is out of range") from error
    if isinstance(value, dict):
        for key, member in value.items():
            _check_text(key, None)
            _check(member, key)
    else:
        _check(value, None)
    return value


def decode_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises InvalidRequest for any other value too."""
    value = decode(body)
    if not isinstance(value, dict):
        raise _refuse("the body must be a JSON object")
    return value


def _refuse(what: str, param: str | None = None) -> InvalidRequest:
    where = f" in {param[:100]!a}" if param is not None else ""
    return InvalidRequest(f"The request body is not acceptable JSON: {what}{where}.", param=param, code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _refuse(f"duplicate key {key[:100]!a}")
    return value


def _no_constant(name: str) -> Any:
    raise _refuse(f"{name} is not a number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _refuse("a number is out of range")
    return value


def _check(root: Any, param: str | None) -> None:
    """Depth, surrogates and integer size of a member of the body; in C for long lists of plain integers (token ids)."""
    level: list[Any] = [[root]]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            values = container
            if type(container) is dict:
                values = container.values()
                for key in container:
                    _check_text(key, param)
            elif container and set(map(type, container)) == {int}:
                _check_int(min(container), max(container), param)
                continue
            for value in values:
                kind = type(value)
                if kind is str:
                    _check_text(value, param)
                elif kind is int:
                    _check_int(value, value, param)
                elif kind is dict or kind is list:
                    below.append(value)
        if not below:
            return
        level = below
    raise _refuse(f"nested deeper than {MAX_DEPTH}", param)


def _check_text(text: str, param: str | None) -> None:
    if not text.isascii() and _SURROGATE.search(text):
        raise _refuse("a string holds a lone surrogate", param)


def _check_int(low: int, high: int, param: str | None) -> None:
    if low < MIN_INT or high > MAX_INT:
        raise _refuse("an integer has more than 64 bits", param)
