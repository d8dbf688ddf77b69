"""A rank's share of a checkpoint: which slice of which tensor it reads.

Found by comparing the tensors of the whole model with the rank's slots: the axis on which they differ is cut. So it
knows no layers and no quantisation, only that shares lie in the order of the ranks, and that several ranks may hold the
same one (KV heads, where there are fewer than ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from inferserve.errors import ConfigError
from inferserve.layers.quant import Slot
from inferserve.parallel.ranks import LEADER, Ranks

BLOCK = 128
"""Rows and columns that share a scale in checkpoints with scales of blocks."""


class Cut(NamedTuple):
    """Indexes [start, stop) on `axis` of a tensor that has `whole` of them."""

    axis: int
    start: int
    stop: int
    whole: int

    def fits(self, shape: torch.Size | list[int]) -> bool:
        """Whether a tensor of this shape is what the cut was made for."""
        return len(shape) > self.axis and shape[self.axis] == self.whole

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice; the tensor as it is where the cut does not fit (its shape is then refused by the loader)."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start) if self.fits(tensor.shape) else tensor


Cuts = Mapping[str, Cut]
"""Checkpoint name, without the prefix `model.` → what is read of it; everything where there is no entry."""

NO_CUTS: Cuts = {}


@dataclass(frozen=True)
class Share:
    """What a rank reads.

    Attributes:
        own: the rank's slots, those of a padded vocabulary without the padding.
        cuts: slices.
        elsewhere: names of biases that only the leader adds, since they follow a sum over the ranks.
    """

    own: dict[str, Slot]
    cuts: Cuts
    elsewhere: tuple[str, ...]


def share_of(shapes: Mapping[str, torch.Size], own: Mapping[str, Slot], ranks: Ranks, scales: str = "") -> Share:
    """The share of `ranks.rank`; padding and the biases of others are set to zero.

    Args:
        shapes: of the whole model's tensors, by checkpoint name.
        own: this rank's slots.
        scales: leaf name of scales of blocks in the checkpoint, '' = it has none.

    Raises ConfigError naming --tp where the tensors cannot be cut so.
    """
    cuts = {name: cut for name, slot in own.items() if (cut := _cut(name, shapes[name], slot.shape, ranks))}
    if scales:
        _check_blocks(cuts, scales, ranks)
    slots, elsewhere = dict(own), []
    for name, slot in own.items():
        matrix = cuts.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and matrix and matrix.axis == 1 and ranks.rank != LEADER:
            _zero(slots.pop(name))
            elsewhere.append(name)
        elif name in cuts and cuts[name].stop - cuts[name].start < slot.shape[cuts[name].axis]:
            slots[name] = _without_padding(slot, cuts[name])
    return Share(slots, cuts, tuple(elsewhere))


def _cut(name: str, whole: torch.Size, own: torch.Size, ranks: Ranks) -> Cut | None:
    axes = [axis for axis in range(len(whole)) if whole[axis] != own[axis]]
    if not axes:
        return None
    (axis,) = axes
    shares = -(-whole[axis] // own[axis])
    if ranks.size % shares:
        raise ConfigError(f"--tp {ranks.size}: {name} with {whole[axis]} rows or columns cannot be cut so")
    start = ranks.rank * shares // ranks.size * own[axis]
    return Cut(axis, start, min(start + own[axis], whole[axis]), whole[axis])


def _check_blocks(cuts: Cuts, scales: str, ranks: Ranks) -> None:
    for name, cut in cuts.items():
        beside = name.removesuffix("weight") + scales
        if name.endswith(".weight") and (beside in cuts) and (cut.stop - cut.start) % BLOCK:
            raise ConfigError(
                f"--tp {ranks.size}: {name} would be cut into {cut.stop - cut.start} rows or columns, inside of the"
                f" {BLOCK} that share a scale"
            )


def _without_padding(slot: Slot, cut: Cut) -> Slot:
    assert isinstance(slot, torch.Tensor), "only float tensors are padded"
    filled = cut.stop - cut.start
    slot.narrow(cut.axis, filled, slot.shape[cut.axis] - filled).zero_()
    return slot.narrow(cut.axis, 0, filled)


def _zero(slot: Slot) -> None:
    assert isinstance(slot, torch.Tensor), "biases are floats"
    slot.zero_()
