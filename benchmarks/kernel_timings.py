"""Timings of the attention kernels against ceilings measured in the same run, and the launch choices that do best.

Decode attention is held against the device's copy rate (bytes of K and V it must read), prefill attention against
cuDNN's attention on the same products. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench, do_bench_cudagraph

from benchmarks.kernel_inputs import BF16, DEVICE, Attention, Lengths, make_pages, ragged, random, step_batch
from inferserve.attention.base import Bucket, LayerSpec
from inferserve.attention.triton import TritonAttention
from inferserve.kernels.launch_config import DecodeConfig, PrefillConfig
from inferserve.kernels.paged_kv import Scores
from inferserve.kv.pool import KvShape

LLAMA = KvShape(8, 128, group=4)
QWEN = KvShape(8, 128, group=2)
FP8 = torch.float8_e4m3fn
_COLD_BYTES = 400e6
"""Layers of a timed case hold at least this together: several times the L2 cache."""

DECODE: tuple[tuple[str, Callable[[], Lengths], KvShape, torch.dtype, float], ...] = (
    ("64 x 4k", lambda: [(1, 4096)] * 64, LLAMA, BF16, 0.9),
    ("256 x 1k", lambda: [(1, 1024)] * 256, LLAMA, BF16, 0.9),
    ("1 x 32k", lambda: [(1, 32768)], LLAMA, BF16, 0.8),
    ("64 of 100 to 8k", lambda: ragged(64, 100, 8192), LLAMA, BF16, 0.85),
    ("256 x 1k, fp8", lambda: [(1, 1024)] * 256, LLAMA, FP8, 0.0),
    ("64 x 4k, fp8", lambda: [(1, 4096)] * 64, LLAMA, FP8, 0.0),
    ("1 x 640", lambda: [(1, 640)], LLAMA, BF16, 0.0),
    ("64 x 1.2k", lambda: [(1, 1200)] * 64, LLAMA, BF16, 0.0),
    ("0.6B: 256 x 640", lambda: [(1, 640)] * 256, QWEN, BF16, 0.0),
)
"""Name, rows, shape, dtype of the pool, share of the copy rate that is wanted."""

PREFILL: tuple[tuple[str, Lengths, float], ...] = (
    ("4 x 4k", [(4096, 4096)] * 4, 0.7),
    ("1 x 16k", [(16384, 16384)], 0.7),
    ("1k over 16k", [(1024, 17408)], 0.7),
    ("16 x 1k", [(1024, 1024)] * 16, 0.7),
    ("256 over 1k", [(256, 1280)], 0.0),
)
"""Name, rows, share of cuDNN's rate that is wanted."""

PAGES = (16, 64, 128, 0)
"""Tokens that lie side by side, beside the 1 of the other cases; 0 = whole rows."""

DECODE_CONFIGS = tuple(
    DecodeConfig(*c)
    for c in ((64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 4, 6), (64, 4, 2), (128, 4, 2), (128, 8, 3), (32, 2, 4))
)
FP8_CONFIGS = tuple(DecodeConfig(*c) for c in ((64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 5)))
PREFILL_CONFIGS = tuple(
    PrefillConfig(*c)
    for c in ((128, 128, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3))
)


@dataclass(frozen=True)
class Timing:
    """One case: microseconds, its rate (TB/s or TFLOP/s), the ceiling's, their ratio, and the ratio that is wanted."""

    name: str
    us: float
    rate: float
    ceiling: float
    share: float
    wanted: float


def copy_rate() -> float:
    """Bytes read plus written in a second by a device copy of 4 GB."""
    source = random(2**30)
    target = torch.empty_like(source)
    ms = do_bench(partial(target.copy_, source), warmup=10, rep=60, return_mode="median")
    return 2 * source.numel() * source.element_size() / ms * 1e3


def decode_us(attention: Attention, layers: int, config: DecodeConfig | None = None) -> float:
    """One launch, in a graph over all layers, so that neither Python nor a warm cache counts."""

    def run() -> None:
        for layer in range(layers):
            attention.decode(layer=layer, config=config)

    run()
    torch.cuda.synchronize()
    return float(do_bench_cudagraph(run, rep=30, return_mode="median")) * 1e3 / layers


def prefill_us(attention: Attention, config: PrefillConfig | None = None) -> float:
    """One launch, with a cold cache."""
    return float(do_bench(partial(attention.prefill, config=config), warmup=10, rep=40, return_mode="median")) * 1e3


def pairs(lengths: Lengths) -> int:
    """Query and key pairs that causal attention multiplies."""
    return sum(q * (n - q) + q * (q + 1) // 2 for q, n in lengths)


def cudnn_rate(lengths: Lengths) -> tuple[float, str]:
    """FLOP/s of cuDNN's attention, 32 heads of 128, on as many products (a chunk over a prefix: without a mask)."""
    (queries, keys), batch = lengths[0], len(lengths)
    q = random(batch, 32, queries, 128)
    k, v = random(batch, 32, keys, 128), random(batch, 32, keys, 128)
    causal = queries == keys
    flops = 4 * 32 * 128 * (pairs(lengths) if causal else batch * queries * keys)
    for backend, name in ((SDPBackend.CUDNN_ATTENTION, "cudnn"), (SDPBackend.FLASH_ATTENTION, "flash")):
        try:
            with sdpa_kernel(backend):
                run = partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
                run()
                ms = do_bench(run, warmup=10, rep=40, return_mode="median")
            return flops / ms * 1e3, name
        except RuntimeError as problem:
            print(f"  {name} attention: {str(problem)[:100]}")
    return float("nan"), "none"


def decode_cases(copy: float) -> Iterator[tuple[str, Callable[[], Timing]]]:
    """Of DECODE."""
    for name, lengths, shape, stored, wanted in DECODE:
        yield f"decode {name}", partial(_decode, f"decode {name}", lengths, shape, stored, wanted, copy)


def mixed_case(copy: float) -> tuple[str, Callable[[], Timing]]:
    """A captured step of decode rows and a chunk, with the writing of its K and V: what running both at once saves."""
    name = "decode 64 x 1.2k beside 256 over 1k"
    return name, partial(_mixed, name, copy)


def _mixed(name: str, copy: float) -> Timing:
    pages = make_pages([*[(1, 1200)] * 64, (256, 1280)], LLAMA, layers=2)
    backend, bucket = TritonAttention(pages.pool), Bucket(320, 256, 256)
    batch = step_batch(pages, bucket.tokens, backend, bucket)
    q, kv = random(bucket.tokens, 32, 128), random(bucket.tokens, 8, 128)

    def run() -> None:
        plan = backend.plan(batch)
        for layer in range(2):
            backend.forward(LayerSpec(layer, 0.09), plan, q, kv, kv)

    run()
    torch.cuda.synchronize()
    us = float(do_bench_cudagraph(run, rep=30, return_mode="median")) * 1e3 / 2
    rate = 64 * 1200 * LLAMA.bytes_per_token(BF16) / us * 1e6
    return Timing(name, us, rate / 1e12, copy / 1e12, rate / copy, 0.0)


def page_cases(copy: float) -> Iterator[tuple[str, Callable[[], Timing]]]:
    """What neighbouring tokens are worth to kernels that gather each of them."""
    for page in PAGES:
        about = f"in pages of {page}" if page else "in one run"
        name, lengths, shape, stored, wanted = DECODE[0]
        case = f"decode {name} {about}"
        yield case, partial(_decode, case, lengths, shape, stored, wanted, copy, page)
        case = f"prefill {PREFILL[1][0]} {about}"
        yield case, partial(_prefill, case, PREFILL[1][1], PREFILL[1][2], page)


def _decode(
    name: str,
    lengths: Callable[[], Lengths],
    shape: KvShape,
    stored: torch.dtype,
    wanted: float,
    copy: float,
    page: int = 1,
) -> Timing:
    attention, layers = decode_inputs(lengths(), shape, stored, page)
    us = decode_us(attention, layers)
    rate = attention.pages.seen_bytes / us * 1e6
    return Timing(name, us, rate / 1e12, copy / 1e12, rate / copy, wanted)


def decode_inputs(lengths: Lengths, shape: KvShape, stored: torch.dtype, page: int = 1) -> tuple[Attention, int]:
    """Attention over enough layers to be cold, and how many."""
    one = sum(n for _, n in lengths) * shape.bytes_per_token(stored)
    layers = min(24, max(1, -(-int(_COLD_BYTES) // one)))
    return Attention.over(make_pages(lengths, shape, stored=stored, layers=layers, page=page), Scores(0.09)), layers


def prefill_cases() -> Iterator[tuple[str, Callable[[], Timing]]]:
    """Of PREFILL."""
    for name, lengths, wanted in PREFILL:
        yield f"prefill {name}", partial(_prefill, f"prefill {name}", lengths, wanted)


def _prefill(name: str, lengths: Lengths, wanted: float, page: int = 1) -> Timing:
    attention = Attention.over(make_pages(lengths, LLAMA, page=page), Scores(0.09))
    us = prefill_us(attention)
    rate = 4 * pairs(lengths) * 32 * 128 / us * 1e6
    ceiling, by = cudnn_rate(lengths)
    return Timing(f"{name} (of {by})", us, rate / 1e12, ceiling / 1e12, rate / ceiling, wanted)


def tune() -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Choices by case, the fastest first."""
    for name, lengths, shape, stored, _ in DECODE[:5]:
        configs = FP8_CONFIGS if stored == FP8 else DECODE_CONFIGS
        yield f"decode {name}", partial(_tune_decode, lengths, shape, stored, configs)
    for name, rows, _ in PREFILL[:3]:
        yield f"prefill {name}", partial(_tune_prefill, rows)


def _tune_decode(
    lengths: Callable[[], Lengths], shape: KvShape, stored: torch.dtype, configs: tuple[DecodeConfig, ...]
) -> list[dict[str, Any]]:
    attention, layers = decode_inputs(lengths(), shape, stored)
    rows = []
    for per_sm in (2, 1, 3, 4):
        lists = Attention.over(attention.pages, Scores(0.09), per_sm=per_sm)
        for config in configs if per_sm == 2 else configs[:2]:
            rows.append({"per_sm": per_sm, **asdict(config), **_timed(decode_us, lists, layers, config)})
    return sorted(rows, key=lambda row: row["us"])


def _tune_prefill(lengths: Lengths) -> list[dict[str, Any]]:
    pages = make_pages(lengths, LLAMA)
    rows = []
    for config in PREFILL_CONFIGS:
        attention = Attention.over(pages, Scores(0.09), block_m=config.block_m)
        rows.append({**asdict(config), **_timed(prefill_us, attention, config)})
    return sorted(rows, key=lambda row: row["us"])


def _timed(measure: Callable[..., float], *args: Any) -> dict[str, Any]:
    """A choice that does not fit the device is the slowest."""
    try:
        return {"us": round(measure(*args), 1)}
    except Exception as problem:
        return {"us": float("inf"), "problem": f"{type(problem).__name__}: {str(problem)[:80]}"}


def compile_all() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each launch choice once on a small step, so that timings find their kernels in the cache."""
    small, chunk = [(1, 300)] * 2, [(70, 300)]
    for shape, stored, configs in (
        (LLAMA, BF16, DECODE_CONFIGS),
        (LLAMA, FP8, FP8_CONFIGS),
        (QWEN, BF16, DECODE_CONFIGS[:1]),
    ):
        for config in configs:
            yield str(config), partial(_small_decode, small, shape, stored, config)
    for choice in PREFILL_CONFIGS:
        yield str(choice), partial(_small_prefill, chunk, choice)


def _small_decode(lengths: Lengths, shape: KvShape, stored: torch.dtype, config: DecodeConfig) -> None:
    Attention.over(make_pages(lengths, shape, stored=stored), Scores(0.09)).decode(config=config)
    torch.cuda.synchronize(DEVICE)


def _small_prefill(lengths: Lengths, config: PrefillConfig) -> None:
    Attention.over(make_pages(lengths, LLAMA), Scores(0.09), block_m=config.block_m).prefill(config=config)
    torch.cuda.synchronize(DEVICE)
