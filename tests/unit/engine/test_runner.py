"""Results of a step on their way from the device: what is waited for, and what the bits mean."""

from __future__ import annotations

import numpy as np
import torch

from inferserve.engine.runner import InFlight
from inferserve.engine.step import TopAlternatives
from inferserve.sampling.sampler import Tops


class Event:
    """Fills the tensor when it is waited for, as the device does."""

    def __init__(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self.target, self.values = target, values

    def synchronize(self) -> None:
        self.target.copy_(self.values)


def test_results_are_read_after_the_event() -> None:
    chosen = torch.zeros((3, 2), dtype=torch.int32)
    logprobs = torch.tensor([-1.5, torch.nan]).view(torch.int32)
    values = torch.stack((torch.tensor([7, 9], dtype=torch.int32), logprobs, torch.tensor([0, 1], dtype=torch.int32)))
    tops = Tops((1,), (1,), torch.tensor([[4, 5]]), torch.tensor([[-0.5, -2.0]]))
    result = InFlight(chosen, tops, Event(chosen, values)).result()
    assert result.token_ids.tolist() == [7, 9] and result.token_ids.dtype == np.int32
    assert result.logprobs[0] == -1.5 and np.isnan(result.logprobs[1])
    assert result.failed.tolist() == [False, True]
    assert result.tops == {1: TopAlternatives((4,), (-0.5,))}
