"""Random weights for `--load-format dummy`: a checkpoint that has every tensor the model asks for.

Matrices are drawn from N(0, 1 / inputs), norms are 1 and biases 0, so that every layer's output has about unit variance
and logits neither vanish nor saturate. The same seed draws the same weights on the same kind of device. Tensors are made
on the device one at a time; what the loader does with them (packing, sharding, quantising) is its business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from inferserve.models.sharding import Cuts

SEED = 0


class RandomTensors:
    """A `TensorSource` (see `weights`) of random numbers.

    Args:
        shapes: name, as in a checkpoint → shape.
        dtype: of all tensors.
        device: where they are made.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device

    def names(self) -> list[str]:
        """See TensorSource."""
        return list(self._shapes)

    def read(self, cuts: Cuts) -> Iterator[tuple[str, torch.Tensor]]:
        """See TensorSource. All of a tensor is drawn even so: the model must not depend on how it is cut."""
        generator = torch.Generator(self._device).manual_seed(SEED)
        for name, shape in self._shapes.items():
            drawn = self._drawn(name, shape, generator)
            yield name, cuts[name].of(drawn) if name in cuts else drawn

    def _drawn(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return tensor.zero_()
        if len(shape) < 2:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
