"""`AllReduce`: the sum over ranks that follows every second matrix product, by message size.

The default is torch.distributed's (NCCL, gloo). `Symmetric` has each GPU read the others' memory directly, over NVLink
or PCIe and without multicast: for the few kilobytes of a decode step NCCL's protocol costs more than the transfer. Both
are made of launches whose shape does not change, so that CUDA graphs can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

ONE_SHOT_BYTES = 256 * 1024
"""Up to here every GPU reads all of the others' data (one exchange); above, a part each, and then the sums (two)."""
SYMMETRIC_BYTES = 8 * 2**20
"""Size of the buffer that the others can read, and the largest sum that goes through it."""

_ALIGNED = 16
_DTYPES = (torch.bfloat16, torch.float32)


class AllReduce(Protocol):
    """One way to sum."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's contiguous `x`; `x` may be overwritten."""
        ...


class Collective:
    """torch.distributed's all-reduce, in place."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See AllReduce."""
        dist.all_reduce(x, group=self._group)
        return x


@dataclass(frozen=True)
class Symmetric:
    """Sums through torch's symmetric memory where size and dtype allow it.

    The buffer serves one sum after the other on one stream: each operation ends with a barrier of all ranks on the device.

    Attributes:
        buffer: uint8 [SYMMETRIC_BYTES], which the other ranks have mapped.
        group: name of the process group.
        ranks: how many it has.
        rest: for all other sums.
    """

    buffer: torch.Tensor
    group: str
    ranks: int
    rest: AllReduce

    @staticmethod
    def between(group: dist.ProcessGroup, device: torch.device, rest: AllReduce) -> Symmetric:
        """Allocate and map; all ranks call it together, on GPUs that are `reachable`."""
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(SYMMETRIC_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group)
        return Symmetric(buffer, group.group_name, dist.get_world_size(group), rest)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See AllReduce."""
        size = x.numel() * x.element_size()
        if size > SYMMETRIC_BYTES or size % (_ALIGNED * self.ranks) or x.dtype not in _DTYPES:
            return self.rest.sum(x)
        shared = self.buffer[:size].view(x.dtype).view(x.shape)
        if size <= ONE_SHOT_BYTES:
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self.group)
            return total
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group)
        return x.copy_(shared)


def reachable(rank: int, size: int) -> bool:
    """Whether the GPU of `rank` can read the memory of all `size` GPUs and torch has the operations for it."""
    names = ("one_shot_all_reduce_copy", "two_shot_all_reduce_")
    known = all(hasattr(torch.ops.symm_mem, name) for name in names)
    return known and all(torch.cuda.can_device_access_peer(rank, other) for other in range(size) if other != rank)
