"""`Kernels`: the ops of one device, chosen once. Layers take it as an argument and never ask what device they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inferserve.kernels import (
    activation,
    argmax,
    kv_write,
    logprobs,
    norm,
    penalties,
    sampling_filter,
    step_inputs,
    step_outputs,
)


@dataclass(frozen=True)
class Kernels:
    """Ops with the signatures of their modules in `inferserve.kernels`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]
    argmax: Callable[[Tensor], tuple[Tensor, Tensor]]
    filter_sample: Callable[[Tensor, sampling_filter.FilterParams, Tensor], None]
    penalise: Callable[[Tensor, penalties.PenaltyParams, Tensor], None]
    append_tokens: Callable[[Tensor, penalties.PenaltyParams, Tensor], None]
    logprobs: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    step_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    step_outputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


TRITON = Kernels(
    rms_norm=norm.rms_norm,
    fused_add_rms_norm=norm.fused_add_rms_norm,
    silu_mul=activation.silu_mul,
    kv_write=kv_write.kv_write,
    argmax=argmax.argmax,
    filter_sample=sampling_filter.filter_sample,
    penalise=penalties.penalise,
    append_tokens=penalties.append_tokens,
    logprobs=logprobs.logprobs,
    step_inputs=step_inputs.step_inputs,
    step_outputs=step_outputs.step_outputs,
)

TORCH = Kernels(
    rms_norm=norm.rms_norm_ref,
    fused_add_rms_norm=norm.fused_add_rms_norm_ref,
    silu_mul=activation.silu_mul_ref,
    kv_write=kv_write.kv_write_ref,
    argmax=argmax.argmax_ref,
    filter_sample=sampling_filter.filter_sample_ref,
    penalise=penalties.penalise_ref,
    append_tokens=penalties.append_tokens_ref,
    logprobs=logprobs.logprobs_ref,
    step_inputs=step_inputs.step_inputs_ref,
    step_outputs=step_outputs.step_outputs_ref,
)


def kernels_for(device: torch.device) -> Kernels:
    """The torch twins on the CPU, Triton elsewhere: on CUDA, and on "meta", where a launch can but be compiled."""
    return TORCH if device.type == "cpu" else TRITON
