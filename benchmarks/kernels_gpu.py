"""Every kernel on a GPU: checked against its torch twin in bf16, then timed against floors measured in the same run.

    python benchmarks/kernels_gpu.py [--out FILE.json] [--no-timing]

The floor of a kernel is its fewest bytes over the device's copy bandwidth, or its multiply-adds over the rate of a
large bf16 matrix product, whichever is longer. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

from benchmarks.kernel_inputs import (
    BF16,
    DEVICE,
    make_pages,
    mixed_batch,
    poison,
    ragged,
    random,
    run_decode,
    run_prefill,
    sampling_mix,
)
from inferserve.attention.base import LayerSpec
from inferserve.attention.registry import make_attention
from inferserve.kernels import activation, decode_attention, kv_write, norm, prefill_attention, rotary
from inferserve.kv.pool import KvShape
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler

TOLERANCE = 1e-2
"""Largest ||out - ref|| / ||ref|| in bf16: a rounding of the operands and one of the result."""


SHORT_US = 20.0
"""Kernels with a floor below this are timed inside a CUDA graph: launching one from Python takes longer."""


@dataclass(frozen=True)
class Check:
    """One comparison with a twin."""

    name: str
    error: float
    passed: bool


@dataclass(frozen=True)
class Timing:
    """One timed case: microseconds, its floor, what bounds the floor, and how it was timed.

    "events" = launched from Python with a cold L2 cache; "graph" = replays of a CUDA graph, which hide the launch and
    leave in the L2 cache what fits there (for kernels shorter than a launch).
    """

    name: str
    us: float
    floor_us: float
    bound: str
    timed: str


@dataclass(frozen=True)
class Floors:
    """Measured ceilings: bytes/s (read plus written), bf16 multiply-adds x 2 per second."""

    copy: float
    matmul: float

    def of(self, moved: float, flops: float = 0.0) -> tuple[float, str]:
        """Microseconds, and which ceiling."""
        memory, arithmetic = moved / self.copy * 1e6, flops / self.matmul * 1e6
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "matmul")


def measure_floors() -> Floors:
    """A copy and a matrix product far larger than the caches, on random data."""
    source = random(2**31)
    target = torch.empty_like(source)
    copy_ms = do_bench(partial(target.copy_, source), return_mode="median")
    moved = 2 * source.numel() * source.element_size()
    source = target = torch.empty(0)
    a, b = random(8192, 8192), random(8192, 8192)
    matmul_ms = do_bench(partial(torch.matmul, a, b), return_mode="median")
    return Floors(moved / copy_ms * 1e3, 2 * 8192**3 / matmul_ms * 1e3)


class Checks:
    """Compares and remembers."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def compare(self, name: str, out: torch.Tensor, ref: torch.Tensor) -> None:
        """Relative error of the whole tensor; NaN anywhere fails."""
        out, ref = out.double(), ref.double()
        error = float((out - ref).norm() / ref.norm())
        self.done.append(Check(name, error, bool(out.isfinite().all()) and error <= TOLERANCE))

    def pointwise(self) -> None:
        """Norms, activation, rotary, KV write."""
        for shape in ((1, 576), (37, 4096), (5, 9, 64), (7, 32, 128)):
            x, weight = random(*shape), random(shape[-1])
            poison()
            self.compare(f"rms_norm {shape}", norm.rms_norm(x, weight, 1e-5), norm.rms_norm_ref(x, weight, 1e-5))
        x, residual, weight = random(129, 4096), random(129, 4096), random(4096)
        poison()
        out, total = norm.fused_add_rms_norm(x, residual, weight, 1e-5)
        ref, ref_total = norm.fused_add_rms_norm_ref(x, residual, weight, 1e-5)
        self.compare("fused_add_rms_norm", out, ref)
        self.compare("fused_add_rms_norm, sum", total, ref_total)
        gate_up = random(67, 2 * 14336)
        poison()
        self.compare("silu_mul", activation.silu_mul(gate_up), activation.silu_mul_ref(gate_up))
        for head_dim, rotated in ((64, 64), (128, 128), (80, 32), (256, 64)):
            q, k, angle = random(33, 32, head_dim), random(33, 8, head_dim), 9 * random(33, rotated // 2)
            cos, sin = angle.float().cos(), angle.float().sin()
            poison()
            for part, out, ref in zip(
                "qk", rotary.apply_rotary(q, k, cos, sin), rotary.apply_rotary_ref(q, k, cos, sin), strict=True
            ):
                self.compare(f"apply_rotary {part} {head_dim}/{rotated}", out, ref)
        k, v, index = random(50, 8, 128), random(50, 8, 64), torch.randperm(999, device=DEVICE)[:50]
        pools = [
            (torch.zeros(999, 8, 128, dtype=BF16, device=DEVICE), torch.zeros(999, 8, 64, dtype=BF16, device=DEVICE))
            for _ in "ab"
        ]
        kv_write.kv_write(k, v, *pools[0], index)
        kv_write.kv_write_ref(k, v, *pools[1], index)
        for part, out, ref in zip("kv", *pools, strict=True):
            self.compare(f"kv_write {part}", out, ref)

    def attention(self) -> None:
        """Decode and prefill over head shapes, windows and caps; the backend on a mixed step."""
        for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128), (8, 8, 80), (24, 8, 96), (8, 1, 256), (28, 4, 128)):
            for window, softcap in ((0, 0.0), (200, 0.0), (0, 20.0)):
                options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
                name = f"{heads}/{kv_heads} heads of {head_dim}, window {window}, cap {softcap:.0f}"
                pages = make_pages(ragged(23, 700), KvShape(kv_heads, head_dim))
                q = random(23, heads, head_dim)
                out = run_decode(decode_attention.decode_attention, pages, q, **options)
                self.compare(
                    f"decode {name}", out, run_decode(decode_attention.decode_attention_ref, pages, q, **options)
                )
                pages = make_pages([(300, 300), (5, 900), (129, 777), (1, 1), (256, 512)], KvShape(kv_heads, head_dim))
                q = random(691, heads, head_dim)
                out = run_prefill(prefill_attention.prefill_attention, pages, q, **options)
                self.compare(
                    f"prefill {name}", out, run_prefill(prefill_attention.prefill_attention_ref, pages, q, **options)
                )
        outs = []
        lengths = [*ragged(9, 300), (64, 64), (17, 400), (1, 9)]
        pages = make_pages(lengths, KvShape(8, 128))
        tokens = sum(q for q, _ in lengths)
        q, k, v = random(tokens, 32, 128), random(tokens, 8, 128), random(tokens, 8, 128)
        for name in ("triton", "reference"):
            backend = make_attention(name, pages.pool, DEVICE)
            outs.append(backend.forward(LayerSpec(0, 0.09), backend.plan(mixed_batch(pages, 9)), q, k, v))
        self.compare("triton backend, mixed step", outs[0], outs[1])

    def sampling(self) -> None:
        """The filter kernel and the whole sampler draw the tokens that the CPU draws, and wait for nothing."""
        rows, vocab = 96, 151936
        logits = random(rows, vocab, dtype=torch.float32) * 2.5
        cuda, cpu = (Sampler(rows, 4096, vocab, torch.device(d), (7,)) for d in ("cuda", "cpu"))
        none = np.zeros(0, np.int32)
        for row in range(rows):
            params = sampling_mix(row)
            for sampler in (cuda, cpu):
                sampler.open_row(row, params, np.arange(row, row + 50, dtype=np.int32), none)
        numbers = np.arange(rows, dtype=np.int32)
        host = logits.cpu()
        expected = cpu.sample(host, numbers, numbers * 0)
        cuda.sample(logits, numbers, numbers * 0)  # compiles
        for row in range(rows):
            cuda.open_row(row, sampling_mix(row), np.arange(row, row + 50, dtype=np.int32), none)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = cuda.sample(logits, numbers, numbers * 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        share = float((sampled.token_ids.cpu() != expected.token_ids).float().mean())
        self.done.append(Check("sampler: share of tokens that differ from the CPU's", share, share <= 0.03))
        asked = ~expected.logprobs.isnan() & (sampled.token_ids.cpu() == expected.token_ids)
        self.compare("sampler: logprobs", sampled.logprobs.cpu()[asked], expected.logprobs[asked])
        broken = logits.clone()
        broken[5, 77] = torch.nan
        failed = cuda.sample(broken, numbers, numbers * 0 + 1).failed.nonzero().flatten().tolist()
        self.done.append(Check("sampler: a NaN row fails alone", 0.0, failed == [5]))


class Timings:
    """Times and remembers."""

    def __init__(self, floors: Floors) -> None:
        self.floors = floors
        self.done: list[Timing] = []

    def time(
        self, name: str, run: Callable[[], object], moved: float, flops: float = 0.0, *, graph: bool = True
    ) -> None:
        """`moved`: fewest bytes read and written; `flops`: two per multiply-add."""
        floor, bound = self.floors.of(moved, flops)
        torch.cuda.synchronize()  # do_bench_cudagraph works on a stream of its own, which waits for nothing
        if graph and floor < SHORT_US:
            self.done.append(Timing(name, do_bench_cudagraph(run, return_mode="median") * 1e3, floor, bound, "graph"))
        else:
            self.done.append(Timing(name, do_bench(run, return_mode="median") * 1e3, floor, bound, "events"))

    def pointwise(self) -> None:
        """At 8192 tokens of a Llama-3.1-8B, and at 64."""
        for tokens in (64, 8192):
            x, residual, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
            self.time(f"rms_norm {tokens}x4096", partial(norm.rms_norm, x, weight, 1e-5), 4 * x.numel())
            self.time(
                f"fused_add_rms_norm {tokens}x4096",
                partial(norm.fused_add_rms_norm, x, residual, weight, 1e-5),
                8 * x.numel(),
            )
            gate_up = random(tokens, 2 * 14336)
            self.time(f"silu_mul {tokens}x14336", partial(activation.silu_mul, gate_up), 3 * gate_up.numel())
            q, k, angle = random(tokens, 32, 128), random(tokens, 8, 128), random(tokens, 64, dtype=torch.float32)
            self.time(
                f"apply_rotary {tokens} tokens, 32+8 heads of 128",
                partial(rotary.apply_rotary, q, k, angle, angle),
                4 * (q.numel() + k.numel()) + 8 * angle.numel(),
            )
            pool_k, pool_v = random(100_000, 8, 128), random(100_000, 8, 128)
            index = torch.randperm(100_000, device=DEVICE)[:tokens]
            self.time(
                f"kv_write {tokens} tokens, 8 heads of 128",
                partial(kv_write.kv_write, k, k, pool_k, pool_v, index),
                8 * k.numel(),
            )

    def decode(self, name: str, lengths: list[tuple[int, int]], heads: int, shape: KvShape, window: int = 0) -> None:
        """Decode attention; the floor is reading the visible K and V once."""
        pages, q = make_pages(lengths, shape), random(len(lengths), heads, shape.head_dim)
        seen = sum(min(n, window) if window else n for _, n in lengths)
        self.time(
            f"decode {name}",
            lambda: run_decode(decode_attention.decode_attention, pages, q, scale=0.1, window=window),
            seen * shape.bytes_per_token(BF16),
            4 * seen * heads * shape.head_dim,
        )

    def prefill(self, name: str, lengths: list[tuple[int, int]], heads: int, shape: KvShape) -> None:
        """Prefill attention; the floor is the products of the causal half at the matrix rate."""
        pages, q = make_pages(lengths, shape), random(sum(n for n, _ in lengths), heads, shape.head_dim)
        pairs = sum(q_len * (n - q_len) + q_len * (q_len + 1) // 2 for q_len, n in lengths)
        self.time(
            f"prefill {name}",
            lambda: run_prefill(prefill_attention.prefill_attention, pages, q, scale=0.1),
            pages.kv_tokens * shape.bytes_per_token(BF16) + 4 * q.numel(),
            4 * pairs * heads * shape.head_dim,
        )

    def attention(self) -> None:
        """Llama-3.1-8B and SmolLM2 shapes, and torch's own attention on the same products for scale."""
        llama, smol = KvShape(8, 128), KvShape(3, 64)
        self.decode("8B, 1 row of 8192", [(1, 8192)], 32, llama)
        self.decode("8B, 64 rows around 1024", ragged(64, 1024), 32, llama)
        self.decode("8B, 256 rows around 1024", ragged(256, 1024), 32, llama)
        self.decode("8B, 16 rows of 32768", [(1, 32768)] * 16, 32, llama)
        self.decode("8B, 64 rows of 16384, window 4096", [(1, 16384)] * 64, 32, llama, window=4096)
        self.decode("SmolLM2, 64 rows around 512", ragged(64, 512), 9, smol)
        self.prefill("8B, 1 prompt of 4096", [(4096, 4096)], 32, llama)
        self.prefill("8B, chunk of 2048 after 14336", [(2048, 16384)], 32, llama)
        self.prefill("8B, 16 prompts of 512", [(512, 512)] * 16, 32, llama)
        self.prefill("SmolLM2, 16 prompts of 512", [(512, 512)] * 16, 9, smol)
        q, k = random(1, 32, 4096, 128), random(1, 32, 4096, 128)
        self.time(
            "(torch scaled_dot_product_attention, 1 prompt of 4096, contiguous)",
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True),
            0,
            4 * 4096 * 4097 // 2 * 32 * 128,
        )

    def sampling(self) -> None:
        """Whole sampler, vocabulary of 151936; the floor is reading the logits once."""
        vocab, none = 151936, np.zeros(0, np.int32)
        kinds = {
            "greedy": SamplingParams(temperature=0.0),
            "temperature": SamplingParams(seed=1),
            "top-p 0.9": SamplingParams(seed=1, top_p=0.9),
            "top-k 50": SamplingParams(seed=1, top_k=50),
            "greedy, repetition": SamplingParams(temperature=0.0, repetition_penalty=1.1),
        }
        prompt = np.arange(1000, dtype=np.int32)
        for rows in (1, 64, 256):
            logits = random(rows, vocab) * 2.5
            numbers = np.arange(rows, dtype=np.int32)
            for name, params in kinds.items():
                sampler = Sampler(rows, 4096, vocab, DEVICE, ())
                for row in range(rows):
                    sampler.open_row(row, params, prompt, none)
                self.time(
                    f"sampler {name}, {rows} rows of {vocab}",
                    partial(sampler.sample, logits, numbers, numbers),
                    2 * logits.numel(),
                    graph=False,
                )


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_gpu.json")
    parser.add_argument("--no-timing", action="store_true", help="checks only")
    args = parser.parse_args()
    checks = Checks()
    for part in (checks.pointwise, checks.attention, checks.sampling):
        part()
    bad = [c for c in checks.done if not c.passed]
    result: dict[str, object] = {
        "command": "python benchmarks/kernels_gpu.py" + (" --no-timing" if args.no_timing else ""),
        "device": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "checks": [dataclasses.asdict(c) for c in checks.done],
    }
    print(f"{len(checks.done)} checks, worst relative error {max(c.error for c in checks.done):.1e}, {len(bad)} failed")
    for check in bad:
        print(f"  FAILED {check.name}: {check.error:.2e}")
    if not args.no_timing:
        floors = measure_floors()
        timings = Timings(floors)
        for part in (timings.pointwise, timings.attention, timings.sampling):
            part()
        result["floors"] = {"copy_tb_s": floors.copy / 1e12, "matmul_tflop_s": floors.matmul / 1e12}
        result["timings"] = [dataclasses.asdict(t) for t in timings.done]
        print(f"copy {floors.copy / 1e12:.2f} TB/s, bf16 matmul {floors.matmul / 1e12:.0f} TFLOP/s")
        for t in timings.done:
            print(
                f"  {t.name:68s} {t.us:9.1f} us  floor {t.floor_us:8.1f} ({t.bound}, {t.timed})  x{t.us / max(t.floor_us, 1e-9):.1f}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
