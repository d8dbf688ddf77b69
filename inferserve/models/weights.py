"""Weights as data: a `WeightRow` says where a checkpoint's tensor goes; the loader streams, and allows no gap or leftover.

Knows checkpoint names and module paths, nothing of families or formats: a `TensorSource` (safetensors here, GGUF in
`gguf_weights`) yields named tensors one at a time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from inferserve.errors import ConfigError
from inferserve.layers.linear import Linear
from inferserve.layers.quant import FP8, Slot
from inferserve.log import event
from inferserve.models.sharding import NO_CUTS, Cut, Cuts

log = logging.getLogger(__name__)

PREFIX = "model."
_LEAVES = ("weight", "bias")
_NAMED_IN_ERRORS = 8
_PROGRESS_EVERY_S = 2.0
_GIB = 2**30


class WeightRow(NamedTuple):
    """Where a tensor of a checkpoint goes.

    `name` and `target` are paths without leaf; `{i}` is the layer, weight and bias go alike. `part` is the slot in a
    packed matrix, or None. A prefix `model.` in the checkpoint is optional.
    """

    name: str
    target: str
    part: int | None = None


Destinations = Mapping[str, Slot]
"""Checkpoint name, without the prefix `model.` → what it fills."""


class TensorSource(Protocol):
    """A checkpoint."""

    def names(self) -> list[str]:
        """Names of all tensors, as in a Hugging Face checkpoint."""
        ...

    def read(self, cuts: Cuts) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, or the slice of it that `cuts` wants. Raises ConfigError for a damaged file."""
        ...


class Safetensors:
    """A folder's `model.safetensors`, or the shards that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, list[str]] = {}
        for path in _shards(folder):
            with _opened(path) as file:
                self._files[path] = list(file.keys())

    def names(self) -> list[str]:
        """See TensorSource."""
        return [name for names in self._files.values() for name in names]

    def read(self, cuts: Cuts) -> Iterator[tuple[str, torch.Tensor]]:
        """See TensorSource. Of a tensor that is cut, only the slice is read."""
        for path, names in self._files.items():
            with _opened(path) as file:
                for name in names:
                    cut = cuts.get(name.removeprefix(PREFIX))
                    yield name, file.get_tensor(name) if cut is None else _slice(file, name, cut)


def _slice(file: Any, name: str, cut: Cut) -> torch.Tensor:
    stored = file.get_slice(name)
    if not cut.fits(stored.get_shape()):
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    part: torch.Tensor = stored[(slice(None),) * cut.axis + (slice(cut.start, cut.stop),)]
    return part


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file ({error})") from error


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not a safetensors index ({error})") from error
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{folder}: weight files named in {index.name} are missing: {_some(missing)}")
        return [folder / name for name in named]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        hint = " (PyTorch .bin files are not read: convert them)" if list(folder.glob("*.bin")) else ""
        raise ConfigError(f"--model-dir {folder}: no *.safetensors file{hint}")
    return found


def destinations(model: nn.Module, rows: tuple[WeightRow, ...], layers: int) -> Destinations:
    """Where every tensor that `model` has comes from, by the rows of its family."""
    modules = dict(model.named_modules())
    found: dict[str, Slot] = {}
    for row in rows:
        for i in range(layers) if "{i}" in row.name else (0,):
            module = modules.get(row.target.format(i=i))
            for leaf, slot in _slots(module, row.part).items():
                found[f"{row.name.format(i=i)}.{leaf}"] = slot
    return found


def _slots(module: nn.Module | None, part: int | None) -> Mapping[str, Slot]:
    if isinstance(module, Linear):
        return module.slots(part or 0)
    assert part is None, "a row with a part must aim at a Linear"
    return {leaf: getattr(module, leaf) for leaf in _LEAVES if getattr(module, leaf, None) is not None}


def load(
    source: TensorSource,
    wanted: Destinations,
    optional: Destinations,
    ignored: tuple[str, ...],
    cuts: Cuts = NO_CUTS,
    upload: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Fill every wanted destination.

    Args:
        source: the checkpoint; the prefix `model.` of its names is optional.
        wanted, optional: what must and what may come.
        ignored: endings of names that a checkpoint may hold and nobody needs.
        cuts: slices of tensors that are read in place of the whole.
        upload: takes a tensor to where it is wanted, in the stead of the destination.

    Raises:
        ConfigError: tensors are missing, left over, or of another shape; it names them.
    """
    names = {name: name.removeprefix(PREFIX) for name in source.names()}
    present = set(names.values())
    extra = [n for n, key in names.items() if key not in wanted and key not in optional and not n.endswith(ignored)]
    _refuse("the checkpoint lacks tensors", [name for name in wanted if name not in present])
    _refuse("the checkpoint holds tensors that this model has no place for", extra)
    progress = _Progress(sum(slot.nbytes for slot in wanted.values()))
    for name, tensor in source.read(cuts):
        view = wanted.get(names[name], optional.get(names[name]))
        if view is None:
            continue
        if view.shape != tensor.shape:
            raise ConfigError(f"tensor {name} is {tuple(tensor.shape)}, config.json says {tuple(view.shape)}")
        if tensor.dtype != view.dtype and (view.dtype == FP8 or tensor.dtype.itemsize == 1):
            raise ConfigError(f"tensor {name} is {tensor.dtype}, which is not what quantization_config describes")
        view.copy_(upload(tensor) if upload else tensor)
        progress.add(view.nbytes)


class _Progress:
    """A line every now and then while memory is filled."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._done = 0
        self._began = self._shown = time.monotonic()

    def add(self, size: int) -> None:
        """`size` more bytes are filled."""
        self._done += size
        now = time.monotonic()
        if now - self._shown >= _PROGRESS_EVERY_S:
            self._shown = now
            gib = f"{self._done / _GIB:.2f}/{self._whole / _GIB:.2f}"
            event(log, "loading weights", gib=gib, seconds=round(now - self._began, 1))


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        raise ConfigError(f"{problem}: {_some(names)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_ERRORS])
    return shown + (f" and {len(names) - _NAMED_IN_ERRORS} more" if len(names) > _NAMED_IN_ERRORS else "")
