"""Checks of `fused_gpu`: each kernel against its torch twin, on fresh random data with poisoned outputs.

A check is a name, a function that returns an error, and the largest error that passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.fused_inputs import (
    BF16,
    DEVICE,
    EIGHT_B,
    KINDS,
    SMALL,
    VOCAB,
    ModelShape,
    filter_params,
    make_sampler,
    poison,
    random,
    rope_case,
)
from inferserve.kernels import activation, argmax, kv_write, logprobs, norm, penalties, rope_write, sampling_filter
from inferserve.kernels.kv_quant import dequantise, is_quantised

Check = tuple[str, Callable[[], float], float]
ROUNDING = 1e-2
"""Largest ||out - ref|| / ||ref|| in bf16: a rounding of the operands and one of the result."""
QUANTISED = 2e-2
"""The same where numbers near the border of two codes may fall to either side."""


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Of the whole tensor; infinite if anything is not a number."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm()) if bool(out.isfinite().all()) else float("inf")


def checks() -> Iterator[Check]:
    """All of them."""
    for shape in (EIGHT_B, SMALL):
        for tokens in (1, 67, 1030):
            yield f"rope_write, {shape.name}, {tokens} tokens", partial(_rope, shape, tokens, BF16), ROUNDING
        for stored in (torch.float8_e4m3fn, torch.int8):
            yield f"rope_write, {shape.name}, {stored}", partial(_rope, shape, 67, stored), QUANTISED
    for rows, width in ((1, 4096), (67, 4096), (300, 1024), (9, 576)):
        yield f"norms, {rows} x {width}", partial(_norms, rows, width), ROUNDING
    for rows, width in ((1, 14336), (300, 14336), (5, 3072)):
        yield f"silu_mul, {rows} x {width}", partial(_silu, rows, width), ROUNDING
    for dtype in (BF16, torch.int8, torch.float8_e4m3fn):
        yield f"kv_write, {dtype}", partial(_kv_write, dtype), QUANTISED
    for dtype in (BF16, torch.float32):
        yield f"argmax, {dtype}", partial(_argmax, dtype), 0.0
        yield f"logprobs, {dtype}", partial(_logprobs, dtype), 1e-4
        for kind in ("temperature", "top-p 0.9", "top-k 50", "top-k 20, top-p 0.8"):
            yield f"filter, {kind}, {dtype}", partial(_filter, kind, dtype), 0.03
    yield "penalties", _penalties, 1e-5
    yield "argmax of rows that make no sense", _broken, 0.0
    yield "sampler waits for nothing, and draws what the CPU draws", _sampler, 0.03


def _rope(shape: ModelShape, tokens: int, stored: torch.dtype) -> float:
    case = rope_case(shape, tokens, stored)
    twin = case.empty()
    poison()
    worst = error(case.run(rope_write.rope_write), twin.run(rope_write.rope_write_ref))
    for i in range(2):
        out, ref = (_read(c.pools[i], c.scales[i], case.index) for c in (case, twin))
        worst = max(worst, error(out, ref))
    untouched = torch.ones(case.pools[0].shape[0], dtype=torch.bool, device=DEVICE)
    untouched[case.index] = False
    same = (
        p.view(torch.uint8)[untouched] == q.view(torch.uint8)[untouched]
        for p, q in zip(case.pools, twin.pools, strict=True)
    )
    return worst if all(bool(s.all()) for s in same) else float("inf")


def _read(pool: torch.Tensor, scale: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
    if scale is None or not is_quantised(pool.dtype):
        return pool[index]
    return dequantise(pool.view(torch.int8)[index].view(pool.dtype), scale[index], torch.float32)


def _norms(rows: int, width: int) -> float:
    x, residual, weight = random(rows, width), random(rows, width), random(width)
    poison()
    worst = error(norm.rms_norm(x, weight, 1e-5), norm.rms_norm_ref(x, weight, 1e-5))
    pairs = zip(
        norm.fused_add_rms_norm(x, residual, weight, 1e-5),
        norm.fused_add_rms_norm_ref(x, residual, weight, 1e-5),
        strict=True,
    )
    return max(worst, *(error(out, ref) for out, ref in pairs))


def _silu(rows: int, width: int) -> float:
    gate_up = 3 * random(rows, 2 * width)
    poison()
    return error(activation.silu_mul(gate_up), activation.silu_mul_ref(gate_up))


def _kv_write(stored: torch.dtype) -> float:
    k, v, index = random(50, 8, 128), random(50, 8, 64), torch.randperm(999, device=DEVICE)[:50]
    reads = []
    for op in (kv_write.kv_write, kv_write.kv_write_ref):
        pools = [torch.zeros(999, 8, d, dtype=torch.int8, device=DEVICE) for d in (128, 64)]
        pools = [p.view(stored) if is_quantised(stored) else p.to(stored) for p in pools]
        scales = [torch.full((999, 8), torch.nan, device=DEVICE) if is_quantised(stored) else None for _ in pools]
        op(k, v, pools[0], pools[1], index, scales[0], scales[1])
        reads.append([_read(p, s, index) for p, s in zip(pools, scales, strict=True)])
    return max(error(out, ref) for out, ref in zip(*reads, strict=True))


def _argmax(dtype: torch.dtype) -> float:
    wrong = 0
    for rows in (1, 33, 256):
        logits = random(rows, VOCAB, dtype=dtype)
        poison()
        out, failed = argmax.argmax(logits)
        # Among equals, which bf16 has many of, the first.
        first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        wrong += int((out != first).sum()) + int(failed.sum())
    return float(wrong)


def _broken() -> float:
    logits = random(40, VOCAB)
    logits[3, VOCAB - 100], logits[7, 5], logits[11] = torch.nan, torch.inf, -torch.inf
    token_ids, failed = argmax.argmax(logits)
    right = failed.nonzero().flatten().tolist() == [3, 7, 11] and bool(((token_ids >= 0) & (token_ids < VOCAB)).all())
    return 0.0 if right else float("inf")


def _logprobs(dtype: torch.dtype) -> float:
    logits, index = 3 * random(70, VOCAB, dtype=dtype), torch.randperm(70, device=DEVICE)[:40]
    token_ids = torch.randint(VOCAB, (70,), device=DEVICE)
    outs = [torch.zeros(70, device=DEVICE) for _ in range(2)]
    poison()
    ids, values = logprobs.logprobs(logits, index, token_ids, outs[0], 20)
    _, expected = logprobs.logprobs_ref(logits, index, token_ids, outs[1], 20)
    chosen = logits[index].gather(1, ids).float()
    return max(error(outs[0], outs[1]), error(values, expected), error(chosen, logits[index].float().topk(20).values))


def _filter(kind: str, dtype: torch.dtype) -> float:
    """Share of the tokens that differ, as where a draw falls on the border of two."""
    rows = 200
    logits, params = 2.5 * random(rows, VOCAB, dtype=dtype), filter_params(kind, rows)
    outs = [torch.full((rows,), -1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    poison()
    sampling_filter.filter_sample(logits, params, outs[0])
    sampling_filter.filter_sample_ref(logits, params, outs[1])
    inside = bool(((outs[0] >= 0) & (outs[0] < VOCAB)).all())
    return float((outs[0] != outs[1]).float().mean()) if inside else float("inf")


def _penalties() -> float:
    rows, width, places = 40, VOCAB + 16, 3000
    draw = np.random.default_rng()
    total = draw.integers(0, places, rows)
    strengths = np.stack((draw.uniform(0.5, 2, rows), draw.uniform(-1, 1, rows), draw.uniform(-1, 1, rows)))
    columns = (np.arange(rows), np.arange(rows), np.arange(rows), total // 3, total)
    table = np.stack((*columns, *strengths.astype(np.float32).view(np.int32))).astype(np.int32)
    params = penalties.PenaltyParams(torch.from_numpy(table).to(DEVICE), int(total.max()))
    # Few tokens, so that they repeat; those of a prompt's part are distinct.
    history = torch.randint(2000, (rows, places), device=DEVICE)
    for row, prompt in enumerate((total // 3).tolist()):
        history[row, :prompt] = torch.randperm(2000, device=DEVICE)[:prompt]
    work = 4 * random(rows, width, dtype=torch.float32)
    twin = work.clone()
    penalties.penalise(work, params, history)
    penalties.penalise_ref(twin, params, history)
    return error(work[:, :VOCAB], twin[:, :VOCAB])


def _sampler() -> float:
    """Share of the rows that differ from the CPU's, over all kinds of params."""
    rows = 3 * len(KINDS)
    cuda, logits, numbers = make_sampler("mixed", rows)
    cuda.sample(logits, numbers, numbers * 0 + 100)
    cuda, _, _ = make_sampler("mixed", rows)
    cpu, _, _ = make_sampler("mixed", rows, torch.device("cpu"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = cuda.sample(logits, numbers, numbers * 0 + 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = cpu.sample(logits.cpu(), numbers, numbers * 0 + 100)
    same = sampled.token_ids.cpu() == expected.token_ids
    asked = ~expected.logprobs.isnan() & same
    if error(sampled.logprobs.cpu()[asked], expected.logprobs[asked]) > 1e-3 or bool(sampled.failed.any()):
        return float("inf")
    return float((~same).float().mean())
