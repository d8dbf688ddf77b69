"""Names of attention backends, and the one place that makes one."""

from __future__ import annotations

import torch

from inferserve.attention.base import AttentionBackend
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvPool


def make_attention(name: str, pool: KvPool, device: torch.device, *, deterministic: bool = False) -> AttentionBackend:
    """Backend `name` ("triton", "reference") over `pool`. Raises ConfigError for a name that does not fit the device."""
    if name == "reference":
        return ReferenceAttention(pool, device)
    if name == "triton" and device.type == "cuda":
        return TritonAttention(pool, deterministic)
    raise ConfigError(f"--attention-backend {name} does not run on {device.type}")
