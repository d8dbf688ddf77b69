"""Rotary position embedding: every rope kind of Llama-like models, as cos and sin per token of a step.

Formulas are those of transformers' `modeling_rope_utils` (named at each function). All kinds but `dynamic` are a table
over positions, made once; `dynamic` depends on the length of the row as well.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from inferserve.attention.base import AttentionBatch
from inferserve.config.model_config import RopeConfig
from inferserve.kernels.rope_write import Rotation


class Rotary(nn.Module):
    """Rotations of a step's tokens.

    `freq_factors` [rotated / 2] divide the frequencies; GGUF files carry llama3 scaling in this form, else they are 1.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        """`max_position` is the config's, from which `dynamic` starts to stretch."""
        super().__init__()
        self.rope = rope
        self.rotated = int(head_dim * rope.partial)
        self.max_position = max_position
        self.freq_factors = nn.Parameter(torch.ones(self.rotated // 2, dtype=torch.float32), requires_grad=False)
        self.exponents = torch.empty(0)
        self.tables = Rotation(torch.empty(0), torch.empty(0), None)

    def prepare(self, length: int, device: torch.device) -> None:
        """Make the tables for positions [0, length). Call after loading."""
        freq = inverse_frequencies(self.rope, self.rotated).to(device) / self.freq_factors
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * freq
        scale = attention_factor(self.rope)
        self.exponents = (_even(self.rotated) / self.rotated).to(device)
        self.tables = Rotation(angles.cos() * scale, angles.sin() * scale, None)

    def forward(self, batch: AttentionBatch) -> Rotation:
        """Rotation of each token of the step, scaled by the rope kind's attention factor."""
        if self.rope.kind == "dynamic" and batch.max_kv_len > self.max_position:
            return self._dynamic(batch)
        cos, sin, _ = self.tables
        if cos.device.type != "cpu":
            # Every layer's kernel looks the angles up itself.
            return Rotation(cos, sin, batch.positions)
        return Rotation(cos.index_select(0, batch.positions), sin.index_select(0, batch.positions), None)

    def _dynamic(self, batch: AttentionBatch) -> Rotation:
        """Per row, since the base grows with the row's length. Source: `_compute_dynamic_ntk_parameters`."""
        tokens, dim, rope = batch.positions.shape[0], self.rotated, self.rope
        lengths = torch.diff(batch.query_start)
        total = torch.repeat_interleave(batch.kv_len, lengths, output_size=tokens).clamp(min=self.max_position)
        stretch = rope.factor * total.double() / self.max_position - (rope.factor - 1)
        base = (rope.theta * stretch ** (dim / (dim - 2))).float()
        freq = 1.0 / base[:, None] ** self.exponents
        angles = batch.positions.float()[:, None] * freq
        return Rotation(angles.cos(), angles.sin(), None)


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Float32 [dim / 2]: radians per position of each rotated pair. `dim` is the rotated part of a head."""
    plain = 1.0 / rope.theta ** (_even(dim) / dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin; other than 1 for yarn alone. Source: `_compute_yarn_parameters`."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _even(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float()


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths divided by factor, short ones kept, a ramp between. Source: `_compute_llama3_parameters`."""
    context = rope.original_max_position
    wavelength = 2 * math.pi / plain
    ramp = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = (1 - ramp) * plain / rope.factor + ramp * plain
    stretched = torch.where(wavelength > context / rope.low_freq_factor, plain / rope.factor, smooth)
    return torch.where(wavelength < context / rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, plain: torch.Tensor, dim: int) -> torch.Tensor:
    """Interpolate slow pairs, keep fast ones, a ramp between. Source: `_compute_yarn_parameters`, arXiv 2309.00071."""

    def pair_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * interpolate + plain * (1 - interpolate)
