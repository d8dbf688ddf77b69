"""`ForwardContext`: everything a layer needs to know about the step, passed as an argument. Frozen; knows no requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferserve.attention.base import AttentionBackend, AttentionBatch, AttentionPlan
from inferserve.kernels.dispatch import Kernels


@dataclass(frozen=True)
class ForwardContext:
    """One step, as layers see it.

    Attributes:
        batch: the rows on the device.
        attention: what attends; also writes K and V.
        plan: `attention.plan(batch)`.
        kernels: operations for the device.
        logits_index: int64 [S], tokens whose logits are wanted, in the order of the results.
    """

    batch: AttentionBatch
    attention: AttentionBackend
    plan: AttentionPlan
    kernels: Kernels
    logits_index: torch.Tensor
