"""What the device allows: copy rate, matrix rate, all GEMMs of a decode step, prefill attention of the best library.

    python -m benchmarks.floors [--shape llama-3.1-8b] [--out FILE]

GEMMs are the model's own (every layer with weights of its own, and the head), through cuBLAS in one CUDA graph for each
number of rows, on random data. Prefill attention is cuDNN's through torch. On a CPU (`--device cpu`) the same is timed
without graphs, to try the program out. About 15 s on an H200 for the 8B shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import schema
from inferserve.config.model_config import ModelConfig
from inferserve.models.registry import read_model_config

ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 320, 512)
PREFILL = ((16, 1024), (4, 4096), (1, 16384))
_SHAPES = Path(__file__).parent / "shapes"
_REPEATS = 15
_BUDGET_S = 1.0
"""A measurement ends after so long, whatever was planned."""


class Device:
    """Makes random tensors and takes times, on a GPU by events."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Fresh normal numbers."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, scale)

    def ms(self, work: Callable[[], object]) -> float:
        """Median milliseconds of a call, after two that do not count."""
        for _ in range(2):
            work()
        self.wait()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < _REPEATS and (not times or time.perf_counter() - began < _BUDGET_S):
            times.append(self._once(work))
        return statistics.median(times)

    def _once(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` as one launch, where the device can do that."""
        if not self.cuda:
            return work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        replay: Callable[[], object] = captured.replay
        return replay

    def wait(self) -> None:
        """Until nothing runs."""
        if self.cuda:
            torch.cuda.synchronize()


def copy_rate(device: Device, megabytes: int) -> float:
    """Bytes read plus written a second, of a device-to-device copy."""
    source = device.random(megabytes * 2**20 // device.dtype.itemsize)
    target = torch.empty_like(source)
    ms = device.ms(partial(target.copy_, source))
    return 2 * source.numel() * source.element_size() / ms * 1e3


def matmul_rate(device: Device, size: int) -> float:
    """Floating-point operations a second of a square product."""
    a, b = device.random(size, size), device.random(size, size)
    return 2 * size**3 / device.ms(partial(torch.matmul, a, b)) * 1e3


def weights_of(config: ModelConfig, device: Device) -> list[torch.Tensor]:
    """The matrices [outputs, inputs] that a decode step multiplies with, in order."""
    size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer = ((queries + 2 * keys, size), (size, queries), (2 * inner, size), (size, inner))
    shapes = [*(layer * config.num_layers), (config.vocab_size, size)]
    return [device.random(*shape, scale=shape[1] ** -0.5) for shape in shapes]


def decode_gemms(config: ModelConfig, device: Device, rows: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of all GEMMs of a step, by number of rows."""
    weights = weights_of(config, device)
    found = {}
    for count in rows:
        inputs = {n: device.random(count, n) for n in {w.shape[1] for w in weights}}
        work = partial(_multiply, weights, inputs)
        found[str(count)] = round(device.ms(device.graph(work)), 3)
    return found


def _multiply(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        functional.linear(inputs[weight.shape[1]], weight)


def prefill_attention(
    config: ModelConfig, device: Device, cases: tuple[tuple[int, int], ...]
) -> dict[str, float | str]:
    """Floating-point operations a second of causal attention, half of the square counted; cuDNN's on a GPU."""
    backend = SDPBackend.CUDNN_ATTENTION if device.cuda else SDPBackend.MATH
    found: dict[str, float | str] = {}
    for batch, length in cases:
        q, k, v = (device.random(batch, config.num_heads, length, config.head_dim) for _ in range(3))
        try:
            with sdpa_kernel(backend):
                ms = device.ms(partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True))
        except RuntimeError as error:  # a build of torch without it
            found[f"{batch}x{length}"] = str(error).splitlines()[0]
            continue
        flops = 4 * batch * config.num_heads * length**2 * config.head_dim / 2
        found[f"{batch}x{length}"] = round(flops / ms * 1e3 / 1e12, 1)
    return found


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All floors; what they are floors of stands in the names."""
    device = Device(args.device)
    path = Path(args.shape)
    config = read_model_config(path if path.is_dir() else _SHAPES / args.shape)
    copy = copy_rate(device, args.copy_mb)
    matmul = matmul_rate(device, args.matmul)
    gemms = decode_gemms(config, device, tuple(args.rows))
    prefill = prefill_attention(config, device, PREFILL if device.cuda else ((1, 128),))
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    return {
        "copy_tb_s": round(copy / 1e12, 4),
        "matmul_tflop_s": round(matmul / 1e12, 2),
        "decode_gemms_ms": gemms,
        "prefill_attention_tflop_s": prefill,
        "kv_bytes_per_token_bf16": kv,
        "kv_ms_per_1k_context_and_row": round(1024 * kv / copy * 1e3, 4),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """For a table in a terminal."""
    gemms = " ".join(f"{rows}:{ms:g}" for rows, ms in figures["decode_gemms_ms"].items())
    prefill = " ".join(f"{case}:{rate}" for case, rate in figures["prefill_attention_tflop_s"].items())
    return [
        f"copy {figures['copy_tb_s']} TB/s, matmul {figures['matmul_tflop_s']} TFLOP/s",
        f"decode GEMMs ms by rows: {gemms}",
        f"prefill attention TFLOP/s: {prefill}",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name in benchmarks/shapes, or a folder")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--copy-mb", type=int, default=4096)
    parser.add_argument("--matmul", type=int, default=8192)
    parser.add_argument("--out", default="", metavar="FILE")
    args = parser.parse_args()
    if args.device == "cuda":
        schema.require_gpu()
    figures = measure(args)
    figures["lines"] = lines(figures)
    print("\n".join(figures["lines"]), flush=True)
    if args.out:
        schema.write(args.out, schema.result("floors", {"shape": args.shape, "rows": list(args.rows)}, figures))


if __name__ == "__main__":
    main()
