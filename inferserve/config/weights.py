"""Headers of safetensors files: enough to know that no shard is missing, truncated or inconsistent.

A file is 8 bytes of header length (little-endian), a JSON header, then the data (safetensors' format description).
Reading the headers of a sharded 70B model takes milliseconds; the data is the engine's to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferserve.errors import ConfigError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
_DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True)
class WeightFacts:
    """Number of weights, and rows of the input embedding (0 when no tensor is called so)."""

    elements: int
    embedding_rows: int


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_weights(folder: Path) -> WeightFacts:
    """Verify every safetensors file of a model folder. Raises one ConfigError with a line for each problem."""
    index = folder / INDEX
    problems: list[str] = []
    expected: dict[str, set[str]] = {}
    if index.is_file():
        for tensor, shard in _read_index(index).items():
            expected.setdefault(shard, set()).add(tensor)
        names = sorted(expected)
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "only pickled ones, which are never loaded; convert them" if pickled else "none there"
        raise ConfigError(f"{folder}: no safetensors weights ({why})")
    shapes: dict[str, list[int]] = {}
    for name in names:
        try:
            found = check_file(folder / name)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        shapes.update(found)
        missing = expected.get(name, set()) - found.keys()
        if missing:
            problems.append(
                f"{folder / name}: tensor {min(missing)!r} is missing ({len(missing)} in all), {INDEX} names it"
            )
    if problems:
        raise ConfigError(*problems)
    return WeightFacts(sum(math.prod(s) for s in shapes.values()), _embedding_rows(shapes))


def _embedding_rows(shapes: dict[str, list[int]]) -> int:
    for name, shape in shapes.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")) and len(shape) == 2:
            return shape[0]
    return 0


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
    outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
    if outside:
        raise ConfigError(f"{path}: shard {outside[0]!r} is not a file name")
    return weight_map


def check_file(path: Path) -> dict[str, list[int]]:
    """Tensor names to shapes of one file. Raises ConfigError naming the file and the tensor that does not fit."""
    try:
        size = path.stat().st_size
        with path.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise ConfigError(f"{path}: truncated or not safetensors ({size} bytes, header of {length})")
            header: dict[str, Any] = msgspec.json.decode(source.read(length), type=dict[str, Any])
        header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, _Tensor])
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: missing shard") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: corrupt safetensors header ({error})") from error
    _check_offsets(path, tensors, size - 8 - length)
    return {name: tensor.shape for name, tensor in tensors.items()}


def _check_offsets(path: Path, tensors: dict[str, _Tensor], data_bytes: int) -> None:
    """Tensors must tile the data without gap or overlap, each as large as its shape says."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        bits = _DTYPE_BITS.get(tensor.dtype)
        if begin != at or end < begin or any(d < 0 for d in tensor.shape):
            raise ConfigError(f"{path}: tensor {name!r} has wrong offsets [{begin}, {end}], expected to start at {at}")
        if bits is not None and (end - begin) * 8 != math.prod(tensor.shape) * bits:
            raise ConfigError(
                f"{path}: tensor {name!r} {tensor.dtype} {tensor.shape} takes {end - begin} bytes, its shape says"
                f" {math.prod(tensor.shape) * bits // 8}"
            )
        at = end
    if at != data_bytes:
        what = "truncated" if at > data_bytes else "too long"
        raise ConfigError(f"{path}: {what}: the header describes {at} bytes of data, the file has {data_bytes}")
