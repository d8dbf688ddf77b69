"""Weights from a GGUF file: llama.cpp's names and layouts turned into a Hugging Face checkpoint's, dequantised.

The tokenizer and config.json of such a file are converted elsewhere, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.errors import ConfigError
from inferserve.models.sharding import Cuts

ROPE_FACTORS = "rope_freqs.weight"
"""llama3 rope scaling as divisors of the frequencies; such files name no rope kind."""


class GgufFile:
    """A `TensorSource` (see `weights`)."""

    def __init__(self, path: Path, wanted: Iterable[str], *, layers: int, rotary_pairs: tuple[int, int] | None) -> None:
        """Open the file.

        Args:
            path: the file.
            wanted: Hugging Face names (without `model.`) that the model asks for; others keep their GGUF name.
            layers: number of layers, to know the names.
            rotary_pairs: (heads, kv_heads) if the file interleaves the rotary halves of q and k.

        Raises ConfigError for a damaged file or an unknown architecture.
        """
        self._path = path
        self._rotary_pairs = rotary_pairs
        try:
            reader = gguf.GGUFReader(path)
            architecture = str(reader.fields["general.architecture"].contents())
            self._tensors = {t.name: t for t in reader.tensors}
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise ConfigError(f"{path}: not a whole GGUF file ({error})") from error
        self._names = _hugging_face_names(architecture, wanted, layers)

    def names(self) -> list[str]:
        """See TensorSource."""
        return [self._names.get(name, name) for name in self._tensors]

    def read(self, cuts: Cuts) -> Iterator[tuple[str, torch.Tensor]]:
        """See TensorSource; float32 whatever the file's quantisation. Of rows that are cut away nothing is dequantised."""
        for name, tensor in self._tensors.items():
            known = self._names.get(name, name)
            cut = cuts.get(known)
            rows = slice(cut.start, cut.stop) if cut and cut.axis == 0 and cut.fits(tensor.data.shape) else slice(None)
            share = len(tensor.data[rows]) / max(1, len(tensor.data))
            plain = torch.from_numpy(self._layout(name, self._dequantise(tensor, rows), share))
            yield known, cut.of(plain) if cut and cut.axis else plain

    def _dequantise(self, tensor: Any, rows: slice) -> NDArray[np.float32]:
        try:
            plain: NDArray[np.float32] = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self._path}: tensor {tensor.name} of type {kind} cannot be read ({error})") from error
        return plain if plain.flags.writeable else plain.copy()

    def _layout(self, name: str, tensor: NDArray[np.float32], share: float) -> NDArray[np.float32]:
        """Undo llama.cpp's reordering of q and k rows (`permute` in its convert_hf_to_gguf.py); `share` of the heads."""
        for piece, index in ((".attn_q.", 0), (".attn_k.", 1)):
            if self._rotary_pairs and piece in name:
                heads = round(self._rotary_pairs[index] * share)
                pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
                return pairs.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def _hugging_face_names(architecture: str, wanted: Iterable[str], layers: int) -> dict[str, str]:
    """GGUF name → wanted name, by the gguf library's own table."""
    arch = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if arch is None:
        raise ConfigError(f"GGUF architecture {architecture!r} is unknown to the gguf library")
    table = gguf.get_tensor_name_map(arch, layers)
    found: dict[str, str] = {}
    for name in wanted:
        path, leaf = name.rsplit(".", 1)
        known = table.get_name(f"model.{path}") or table.get_name(path)
        if known:
            found[f"{known}.{leaf}"] = name
    return found
