"""Names of attention backends, and the one place that makes one."""

from __future__ import annotations

import torch

from inferserve.attention.base import AttentionBackend
from inferserve.attention.dense import DensePrefill
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvPool

_HEAD_DIMS = (64, 128)
"""Head sizes for which the dense kernel was measured."""


def make_attention(
    name: str, pool: KvPool, device: torch.device, *, deterministic: bool = False, plain: bool = False
) -> AttentionBackend:
    """Backend `name` ("triton", "reference") over `pool`. Raises ConfigError for a name that does not fit the device.

    Args:
        deterministic: a row's result must not depend on the rows beside it.
        plain: no layer has a sliding window or a soft cap.
    """
    if name == "reference":
        return ReferenceAttention(pool, device)
    if name == "triton" and device.type == "cuda":
        return TritonAttention(
            pool, deterministic, DensePrefill() if plain and _dense_fits(pool, deterministic) else None
        )
    raise ConfigError(f"--attention-backend {name} does not run on {device.type}")


def _dense_fits(pool: KvPool, deterministic: bool) -> bool:
    """Whether cuDNN's kernel can read the pool; what it computes for a chunk depends on how prompts are cut."""
    exact = pool.k[0].dtype == pool.dtype and pool.dtype in (torch.float16, torch.bfloat16)
    sizes = all(shape.head_dim == shape.value_dim and shape.head_dim in _HEAD_DIMS for shape in pool.shapes)
    return exact and sizes and not deterministic and torch.backends.cudnn.is_available()
