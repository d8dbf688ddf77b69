"""Tensors arrive whole, whatever their size is to a buffer's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inferserve.models import upload
from inferserve.models.upload import Uploader

META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(3, 1000), (1,), (64, 64), (5, 0)], ids=str)
def test_pieces(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code as on a GPU, between two places in host memory."""
    monkeypatch.setattr(upload, "_SMALL", 0)
    torch.manual_seed(1)
    tensors = [torch.randn(shape).to(dtype) for _ in range(5)]
    with torch.inference_mode(), ThreadPoolExecutor(2) as pool:
        send = Uploader(CPU, pool, piece=1000)
        send._device = META  # "already there" must not be the answer
        monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.zeros(*a, **{**k, "device": CPU}))
        arrived = [send(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, arrived, strict=True):
        assert (copy.dtype == dtype and copy.data_ptr() != tensor.data_ptr()) or not tensor.numel()
        assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_there_is_not_copied() -> None:
    with ThreadPoolExecutor(1) as pool:
        tensor = torch.ones(2**20)
        assert Uploader(CPU, pool)(tensor) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.randn(2**18 + i) for i in range(20)]
    with torch.inference_mode(), ThreadPoolExecutor(4) as pool:
        send = Uploader(device, pool, piece=2**19)
        arrived = [send(tensor) for tensor in tensors]
    assert all(torch.equal(copy.cpu(), tensor) for copy, tensor in zip(arrived, tensors, strict=True))
