"""The header of a GGUF file: metadata and tensor table, without tensor data and without arrays.

The `gguf` library builds every token string as a numpy object, which takes seconds for a large vocabulary; start-up
only needs to know that the file is whole and what it holds, so this reader skips arrays. Format: ggml's gguf.md.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from inferserve.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 24
_DIGEST_BYTES = 1 << 20

Scalar = int | float | bool | str


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensor data.

    Attributes:
        metadata: scalar and string keys; an array appears as its length.
        shapes: tensor name to shape, fastest-moving dimension first, as ggml writes it.
    """

    metadata: dict[str, Scalar]
    shapes: dict[str, tuple[int, ...]]

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class _Cursor:
    """Reads little-endian values from a mapping; past its end raises ConfigError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        self.at = 0

    def value(self, form: str) -> int | float | bool:
        size = struct.calcsize(form)
        self._need(size)
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += size
        return value

    def integer(self, form: str = "<Q") -> int:
        return int(self.value(form))

    def skip(self, size: int) -> None:
        self._need(size)
        self.at += size

    def string(self) -> str:
        size = self._string_size()
        text = self._data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors="replace")

    def skip_string(self) -> None:
        size = self._string_size()
        self.at += size

    def _string_size(self) -> int:
        size = self.integer()
        if size > _MAX_STRING:
            raise ConfigError(f"{self.path}: corrupt GGUF header (a string of {size} bytes)")
        self._need(size)
        return size

    def _need(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise ConfigError(f"{self.path}: truncated GGUF file ({len(self._data)} bytes end inside the header)")


def read_header(path: Path) -> GgufHeader:
    """Parse `path` and check that every tensor lies inside the file. Raises ConfigError naming the file."""
    try:
        with path.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data), len(data))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    path = cursor.path
    if size < 24 or cursor.integer("<I") != int.from_bytes(b"GGUF", "little"):
        raise ConfigError(f"{path}: not a GGUF file (wrong magic)")
    version = cursor.integer("<I")
    if version not in (2, 3):
        raise ConfigError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
    tensors, keys = cursor.integer(), cursor.integer()
    metadata = {cursor.string(): _metadata_value(cursor) for _ in range(keys)}
    shapes: dict[str, tuple[int, ...]] = {}
    last = 0
    for _ in range(tensors):
        name = cursor.string()
        dimensions = cursor.integer("<I")
        if dimensions > 8:
            raise ConfigError(f"{path}: corrupt GGUF header (tensor {name!r} of {dimensions} dimensions)")
        shapes[name] = tuple(cursor.integer() for _ in range(dimensions))
        kind, offset = cursor.integer("<I"), cursor.integer()
        last = max(last, offset + _tensor_bytes(path, name, kind, math.prod(shapes[name])))
    alignment = int(metadata.get("general.alignment", 32))
    needed = -(-cursor.at // alignment) * alignment + last
    if needed > size:
        raise ConfigError(f"{path}: truncated GGUF file: {size} bytes, its tensors need {needed}")
    return GgufHeader(metadata, shapes)


def _metadata_value(cursor: _Cursor) -> Scalar:
    kind = cursor.integer("<I")
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _skip_array(cursor)
    if kind not in _SCALARS:
        raise ConfigError(f"{cursor.path}: corrupt GGUF header (value type {kind})")
    return cursor.value(_SCALARS[kind])


def _skip_array(cursor: _Cursor) -> int:
    kind, count = cursor.integer("<I"), cursor.integer()
    if kind == _STRING:
        for _ in range(count):
            cursor.skip_string()
    elif kind in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]))
    else:
        raise ConfigError(f"{cursor.path}: corrupt GGUF header (array of type {kind})")
    return count


# ggml type to (weights, bytes) of one block; ggml.h and ggml-common.h. Types that are not here are not checked for size.
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    30: (1, 2),
}


def _tensor_bytes(path: Path, name: str, kind: int, elements: int) -> int:
    if kind not in _BLOCKS:
        return 0
    weights, size = _BLOCKS[kind]
    if elements % weights:
        raise ConfigError(
            f"{path}: corrupt GGUF header (tensor {name!r} has {elements} weights in blocks of {weights})"
        )
    return elements // weights * size


def file_digest(path: Path, salt: str) -> str:
    """A cheap identity of a large file: size, time of change, first and last MiB. 32 hex digits.

    Args:
        path: the file.
        salt: what else the cached result depends on, such as the converter's version.
    """
    stat = path.stat()
    digest = hashlib.sha256(f"{salt}:{stat.st_size}:{stat.st_mtime_ns}:".encode())
    with path.open("rb") as source:
        digest.update(source.read(_DIGEST_BYTES))
        source.seek(max(0, stat.st_size - _DIGEST_BYTES))
        digest.update(source.read(_DIGEST_BYTES))
    return digest.hexdigest()[:32]
