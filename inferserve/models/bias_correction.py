"""Weights that are quantised at load: what rounding did to the mean of each output is taken back by a bias.

A rounded matrix makes the same error in every product. The mean of that error over inputs, W E[x] - Ŵ E[x̂], is a
constant that a bias undoes (Nagel et al., arXiv 1906.04721, section 4.2). What fp8 still costs in perplexity with it stands
in benchmarks/results/perplexity.json. The means are those of the quantised model over random token ids, so that no text
is needed; the checkpoint is read a second time, a tensor at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch
from inferserve.attention.reference import ReferenceAttention
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.layers.context import ForwardContext
from inferserve.layers.linear import Linear
from inferserve.layers.quant import Fp8Weight, Means, QuantisingSlot
from inferserve.log import event
from inferserve.models.decoder import Decoder
from inferserve.models.sharding import Cuts
from inferserve.models.weights import PREFIX, Destinations, TensorSource

log = logging.getLogger(__name__)

CALIBRATION_TOKENS = 1024
_SEED = 0


def correct_biases(
    model: Decoder,
    source: TensorSource,
    slots: Destinations,
    cuts: Cuts,
    tokens: int,
    device: torch.device,
    upload: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Set the offsets of all matrices that were quantised at load.

    Args:
        model: filled and packed; every rank calls this at the same time.
        source, slots, cuts, upload: what it was filled from, see `weights.load`.
        tokens: random ids that the means are taken over, at most as many as there are rotations.
    """
    began = time.monotonic()
    means = input_means(model, tokens, device)
    for name, tensor in source.read(cuts):
        slot = slots.get(name.removeprefix(PREFIX))
        if isinstance(slot, QuantisingSlot):
            slot.correct(upload(tensor) if upload else tensor, means[slot.weight])
    event(log, "biases corrected", tokens=tokens, seconds=round(time.monotonic() - began, 2))


def input_means(model: Decoder, tokens: int, device: torch.device) -> dict[Fp8Weight, Means]:
    """Means of the inputs of every quantised matrix over one text of random ids, the same at each call."""
    found: dict[Fp8Weight, Means] = {}

    def see(weight: Fp8Weight, x: torch.Tensor) -> None:
        found[weight] = weight.means(x)

    ids = torch.randint(model.spec.vocab, (tokens,), generator=torch.Generator().manual_seed(_SEED))
    with ExitStack() as watching:
        for module in model.modules():
            if isinstance(module, Linear) and module.quantised is not None:
                watching.enter_context(module.observed(partial(see, module.quantised)))
        model.hidden(ids.to(device), _one_prompt(model, tokens, device))
    return found


def _one_prompt(model: Decoder, tokens: int, device: torch.device) -> ForwardContext:
    """A step of one prompt, over a pool of its own."""
    places = torch.arange(tokens, device=device)
    lengths = np.array([tokens], np.int32)
    batch = AttentionBatch(
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        num_decode=0,
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        kv_len=torch.tensor([tokens], dtype=torch.int32, device=device),
        positions=places,
        kv_index=places,
        table=places.int()[None],
        max_query_len=tokens,
        max_kv_len=tokens,
        query_len_host=lengths,
        kv_len_host=lengths,
    )
    attention = ReferenceAttention(KvPool(model.kv_shapes, tokens, model.norm.weight.dtype, device), device)
    return ForwardContext(batch, attention, attention.plan(batch), kernels_for(device), places[-1:])
