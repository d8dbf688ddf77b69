"""Names of attention backends, and the one place that makes one."""

from __future__ import annotations

import logging

import torch

from inferserve.attention.base import AttentionBackend
from inferserve.attention.dense import DensePrefill, cudnn_attention, refusal
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvPool
from inferserve.log import event

log = logging.getLogger(__name__)

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
    if not exact or not sizes or deterministic:
        return False
    heads = {(shape.kv_heads * shape.group, shape.kv_heads): k for shape, k in zip(pool.shapes, pool.k, strict=True)}
    why = next(filter(None, (refusal(cudnn_attention, *of, k) for of, k in heads.items())), "")
    if why:
        event(log, "long prompts go without cuDNN's attention", why=why)
    return not why
