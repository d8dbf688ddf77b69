"""Temperature, top-k, top-p, min-p and the draw, without sorting the vocabulary.

Every filter is a threshold on z = (max - logit) / temperature, so the kept set is {z <= t}: tokens that tie at the
threshold stay together. The kernel searches t among the bits of the float (ordered like integers, since z >= 0), in few
passes over the row and then in what is left of it, and draws by inverse transform in vocabulary order. What top-k leaves
is mostly few: then the rest is done with these alone. One program handles one row and looks at nothing else: a row's
token is a function of its own logits, parameters and uniform number.

    keep_k = the top_k smallest z, ties included
    keep_p = the smallest {z <= t} holding at least top_p of the mass of keep_k  (nucleus, arXiv 1904.09751)
    keep_m = {exp(-z) >= min_p}                                                   (min-p, arXiv 2407.01082)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferserve.kernels import logit_pieces

_INFINITY = tl.constexpr(0x7F800000)
"""Bits of the float."""
_FIRST_CANDIDATES = 256
_LOWER_BITS = 15
_BINS = 1 << (31 - _LOWER_BITS)


@dataclass(frozen=True)
class FilterParams:
    """What to draw, one column a row.

    Attributes:
        table: int32 [7, P] on the device of the logits: the bits of float32 temperature > 0,
            top_p in (0, 1] (1 = off), min_p in [0, 1] (0 = off) and uniform number in [0, 1); top_k >= 1 (vocabulary
            size or more = off); which row of the logits, and which entry of the result.
        filtered: host's knowledge that some row has one of the three on; only the twin looks at it, and at
        max_top_k: host's largest active top_k, 0 if none, and
        whole: that the rows are those of the logits, all in order.
    """

    table: torch.Tensor
    filtered: bool
    max_top_k: int
    whole: bool

    def floats(self, row: int) -> torch.Tensor:
        """One of the first four, float32 [P]."""
        return self.table[row].view(torch.float32)


@triton.jit
def _distance(
    logits: tl.tensor, offset: tl.tensor, n: tl.tensor, inverse: tl.tensor, peak: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """z of one tile; entries past the end are +inf."""
    col = offset + tl.arange(0, BLOCK)
    value = tl.load(logits + col, mask=col < n, other=float("-inf")).to(tl.float32)
    return (peak - value) * inverse


@triton.jit
def _narrow(
    logits: tl.tensor,
    n: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    cap: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(low, high]: bits between which the smallest t with measure({z <= t, z <= cap}) >= wanted lies; the measure is a
    mass, or a count. No more entries between them than a tile holds, or nothing. And the measure up to low, and the
    number of entries up to high.

    A pass over the row measures below three bounds at once; one of the four parts is kept.
    """
    low = tl.full((), -1, tl.int32)
    high = tl.full((), _INFINITY, tl.int32)
    below = tl.full((), 0.0, tl.float32)
    under = tl.full((), 0, tl.int32)
    upto = under + n
    # Each thread's entries are added up at once: one sum a thread and bound.
    within = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    while (upto - under > BLOCK) & (high - low > 1):
        # At least one bound lies strictly between low and high, so that every pass leaves less: quarters at the end.
        gap = high - low
        part = tl.maximum(gap // 4, 1)
        step_0, step_1, step_2 = part, tl.minimum(2 * part, gap), tl.minimum(3 * part, gap)
        if (low < 0) & (high == _INFINITY):
            # 2, 5 and 10.
            step_0, step_1, step_2 = low * 0 + 0x40000001, low * 0 + 0x40A00001, low * 0 + 0x41200001
        elif (high == _INFINITY) & (gap > 0x04000000):
            # 1.5, 4 and 256 times low.
            step_0, step_1, step_2 = low * 0 + 0x00400000, low * 0 + 0x01000000, low * 0 + 0x04000000
        elif (low < 0) & (gap > 0x02000000):
            # An eighth, a half and three quarters of high.
            step_0, step_1, step_2 = gap - 0x01800000, gap - 0x00800000, gap - 0x00400000
        bound_0, bound_1, bound_2 = low + step_0, low + step_1, low + step_2
        count_0 = tl.zeros((BLOCK // 8,), tl.int32)
        count_1 = tl.zeros((BLOCK // 8,), tl.int32)
        count_2 = tl.zeros((BLOCK // 8,), tl.int32)
        mass_0 = tl.zeros((BLOCK // 8,), tl.float32)
        mass_1 = tl.zeros((BLOCK // 8,), tl.float32)
        mass_2 = tl.zeros((BLOCK // 8,), tl.float32)
        for offset in range(0, n, BLOCK):
            col = offset + within
            value = tl.load(logits + col, mask=col < n, other=float("-inf")).to(tl.float32)
            z = (peak - value) * inverse
            bits = z.to(tl.int32, bitcast=True)
            in_0, in_1, in_2 = bits <= bound_0, bits <= bound_1, bits <= bound_2
            weight = tl.where(z <= cap, tl.exp(-z), 0.0)
            count_0 += tl.sum(in_0.to(tl.int32), axis=1)
            count_1 += tl.sum(in_1.to(tl.int32), axis=1)
            count_2 += tl.sum(in_2.to(tl.int32), axis=1)
            mass_0 += tl.sum(tl.where(in_0, weight, 0.0), axis=1)
            mass_1 += tl.sum(tl.where(in_1, weight, 0.0), axis=1)
            mass_2 += tl.sum(tl.where(in_2, weight, 0.0), axis=1)
        less_0, less_1, less_2 = tl.sum(count_0, axis=0), tl.sum(count_1, axis=0), tl.sum(count_2, axis=0)
        reach_0 = tl.where(by_mass, tl.sum(mass_0, axis=0), less_0.to(tl.float32))
        reach_1 = tl.where(by_mass, tl.sum(mass_1, axis=0), less_1.to(tl.float32))
        reach_2 = tl.where(by_mass, tl.sum(mass_2, axis=0), less_2.to(tl.float32))
        if reach_0 >= wanted:
            high, upto = bound_0, less_0
        elif reach_1 >= wanted:
            low, under, below = bound_0, less_0, reach_0
            high, upto = bound_1, less_1
        elif reach_2 >= wanted:
            low, under, below = bound_1, less_1, reach_1
            high, upto = bound_2, less_2
        else:
            low, under, below = bound_2, less_2, reach_2
    return low, high, below, upto


@triton.jit
def _gather(
    logits: tl.tensor,
    n: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    spare: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """z with bits in (low, high] to `spare`, the bits of their indexes behind them, in order; their number."""
    found = tl.full((), 0, tl.int32)
    for offset in range(0, n, BLOCK):
        col = offset + tl.arange(0, BLOCK)
        z = _distance(logits, offset, n, inverse, peak, BLOCK)
        bits = z.to(tl.int32, bitcast=True)
        inside = (bits > low) & (bits <= high) & (z < float("inf"))
        more = tl.sum(inside.to(tl.int32), axis=0)
        if more > 0:
            at = found + tl.cumsum(inside.to(tl.int32), axis=0) - 1
            fits = inside & (at < BLOCK)
            tl.store(spare + at, z, mask=fits)
            tl.store(spare + BLOCK + at, col.to(tl.float32, bitcast=True), mask=fits)
        found += more
    # What one thread has written others read.
    tl.debug_barrier()
    return tl.minimum(found, BLOCK)


@triton.jit
def _mass(
    logits: tl.tensor, n: tl.tensor, inverse: tl.tensor, peak: tl.tensor, limit: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Sum of exp(-z) over {z <= limit}."""
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, n, BLOCK):
        z = _distance(logits, offset, n, inverse, peak, BLOCK)
        total += tl.where(z <= limit, tl.exp(-z), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _draw(
    logits: tl.tensor,
    n: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """First index whose running mass exceeds target; the last kept index if rounding leaves none."""
    before = 0.0
    chosen = -1
    last = 0
    for offset in range(0, n, BLOCK):
        z = _distance(logits, offset, n, inverse, peak, BLOCK)
        weight = tl.where(z <= limit, tl.exp(-z), 0.0)
        after = before + tl.sum(weight, axis=0)
        if (chosen < 0) & (after > before):
            col = offset + tl.arange(0, BLOCK)
            last = tl.max(tl.where(weight > 0.0, col, -1), axis=0)
            if after > target:
                running = before + tl.cumsum(weight, axis=0)
                first = tl.min(tl.where((running > target) & (weight > 0.0), col, n), axis=0)
                chosen = tl.where(first < n, first, last)
        before = after
    return tl.where(chosen < 0, last, chosen)


@triton.jit(do_not_specialize=["rows"])
def _filter_sample_kernel(
    logits: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    spare: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    table += tl.program_id(0)
    inverse = 1.0 / tl.load(table).to(tl.float32, bitcast=True)
    p = tl.load(table + rows).to(tl.float32, bitcast=True)
    m = tl.load(table + 2 * rows).to(tl.float32, bitcast=True)
    uniform = tl.load(table + 3 * rows).to(tl.float32, bitcast=True)
    k = tl.load(table + 4 * rows)
    logits += tl.load(table + 5 * rows).to(tl.int64) * stride
    out += tl.load(table + 6 * rows)
    spare += tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for offset in range(0, n, BLOCK):
        col = offset + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(logits + col, mask=col < n, other=float("-inf")).to(tl.float32))
    peak = tl.max(peaks, axis=0)
    limit = tl.full((), float("inf"), tl.float32)
    place = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32)
    # Whether all that may be kept lies gathered in one tile.
    few = k < 0
    for stage in range(2):
        by_mass = stage == 1
        if tl.where(by_mass, p < 1.0, k < n):
            low = tl.full((), -1, tl.int32)
            high = limit.to(tl.int32, bitcast=True)
            below = tl.full((), 0.0, tl.float32)
            wanted = k.to(tl.float32)
            if few:
                z = tl.load(spare + place, mask=place < found, other=float("inf"))
                wanted = p * tl.sum(tl.where(z <= limit, tl.exp(-z), 0.0), axis=0)
            else:
                if by_mass:
                    wanted = p * _mass(logits, n, inverse, peak, limit, BLOCK)
                low, high, below, upto = _narrow(logits, n, inverse, peak, limit, wanted, by_mass, BLOCK)
                few = upto <= BLOCK
                low = tl.where(few, -1, low)
                below = tl.where(few, 0.0, below)
                found = _gather(logits, n, inverse, peak, low, high, spare, BLOCK)
            z = tl.load(spare + place, mask=place < found, other=float("inf"))
            weight = tl.where(by_mass, tl.where(z <= limit, tl.exp(-z), 0.0), tl.where(z < float("inf"), 1.0, 0.0))
            bits = z.to(tl.int32, bitcast=True)
            while high - low > 1:
                middle = low + (high - low) // 2
                if below + tl.sum(tl.where(bits <= middle, weight, 0.0), axis=0) >= wanted:
                    high = middle
                else:
                    low = middle
            # Out of reach (rounding, or fewer than k possible tokens): the bound stays, everything below is kept.
            limit = tl.minimum(limit, high.to(tl.float32, bitcast=True))
            tl.debug_barrier()
    if m > 0.0:
        limit = tl.minimum(limit, -tl.log(m))
    if few:
        z = tl.load(spare + place, mask=place < found, other=float("inf"))
        weight = tl.where(z <= limit, tl.exp(-z), 0.0)
        target = uniform * tl.sum(weight, axis=0)
        past = (tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
        last = tl.max(tl.where(weight > 0.0, place, 0), axis=0)
        first = tl.minimum(tl.min(tl.where(past, place, BLOCK), axis=0), last)
        token = tl.load(spare + BLOCK + first).to(tl.int32, bitcast=True)
    else:
        target = uniform * _mass(logits, n, inverse, peak, limit, BLOCK)
        token = _draw(logits, n, inverse, peak, limit, target, BLOCK)
    tl.store(out, tl.minimum(tl.maximum(token, 0), n - 1).to(tl.int64))


def filter_sample(logits: torch.Tensor, params: FilterParams, out: torch.Tensor) -> None:
    """Draw one token for each column of `params`.

    Args:
        logits: [S, V] float, last dimension contiguous; -inf marks impossible tokens. A row that holds NaN or +inf or
            only -inf gives a meaningless token in [0, V).
        out: int64, written at the columns' targets.
    """
    rows, config = params.table.shape[1], logit_pieces.FILTER
    if rows:
        spare = torch.empty((rows, 2, config.block), dtype=torch.float32, device=logits.device)
        _filter_sample_kernel[(rows,)](
            logits,
            params.table,
            out,
            spare,
            rows,
            logits.stride(0),
            logits.shape[1],
            BLOCK=config.block,
            num_warps=config.warps,
        )


def thresholds_ref(z: torch.Tensor, weight: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """Largest z kept by top_k and top_p, float32 [S, 1].

    Partial selection first; rows whose nucleus is wider than that take a histogram. How wide it is never depends
    on the neighbours of a row.

    Args:
        z: float32 [S, V], zero at the likeliest token. weight: exp(-z).
    """
    vocab, top_p = z.shape[1], params.floats(1)
    limit = torch.full_like(z[:, :1], torch.inf)
    nucleus = top_p < 1.0
    if not params.max_top_k and not bool(nucleus.any()):
        return limit
    k = params.table[4].to(torch.int64)[:, None]
    limited = bool((k < vocab).all())
    width = min(vocab, params.max_top_k if limited else max(params.max_top_k, _FIRST_CANDIDATES))
    nearest = z.topk(width, dim=-1, largest=False, sorted=True).values
    by_k = torch.where(k < vocab, nearest.gather(1, (k - 1).clamp_max(width - 1)), limit)
    if not bool(nucleus.any()):
        return by_k
    kept = torch.where(z <= by_k, weight, 0.0) if params.max_top_k else weight
    wanted = top_p[:, None] * kept.cumsum(-1)[:, -1:]
    limit, found = _nucleus_ref(nearest, by_k, wanted)
    for row in torch.nonzero(nucleus & ~found[:, 0]).flatten().tolist():
        limit[row] = _wide_nucleus_ref(z[row], kept[row], wanted[row])
    return torch.where(nucleus[:, None], torch.minimum(limit, by_k), by_k)


def _nucleus_ref(nearest: torch.Tensor, cap: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z at which the running mass of sorted `nearest` reaches `wanted`, and whether it does; [S, 1] each."""
    running = torch.where(nearest <= cap, torch.exp(-nearest), 0.0).cumsum(-1)
    place = torch.searchsorted(running, wanted)
    found = place < nearest.shape[1]
    return nearest.gather(1, place.clamp_max(nearest.shape[1] - 1)), found


def _wide_nucleus_ref(z: torch.Tensor, kept: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The same for one row with many tokens in its nucleus: a histogram over the upper half of the bits of z, then a
    sort of the one bin where the mass is reached. z, kept: float32 [V]; wanted: [1]."""
    bins = z.view(torch.int32).bitwise_right_shift(_LOWER_BITS).clamp_(0, _BINS - 1).to(torch.int64)
    running = torch.bincount(bins, weights=kept.double(), minlength=_BINS).cumsum(0)
    place = torch.searchsorted(running, wanted.double()).clamp_max(_BINS - 1)
    members = z[bins == place].sort().values
    below = torch.where(place > 0, running[place - 1], 0.0)
    inside = torch.searchsorted(torch.exp(-members).cumsum(0), (wanted - below).float())
    return members[inside.clamp_max(len(members) - 1)] if len(members) else torch.full_like(wanted, torch.inf)


def filter_sample_ref(logits: torch.Tensor, params: FilterParams, out: torch.Tensor) -> None:
    """Torch twin of `filter_sample`. Fast on the CPU; it waits for the device elsewhere."""
    temperature, min_p, uniform = params.floats(0), params.floats(2), params.floats(3)
    raw = (logits if params.whole else logits.index_select(0, params.table[5])).float()
    z = (raw.amax(-1, keepdim=True) - raw) * temperature.reciprocal()[:, None]
    weight = torch.exp(-z)
    if params.filtered:
        limit = torch.minimum(-torch.log(min_p)[:, None], thresholds_ref(z, weight, params))
        weight = torch.where(z <= limit, weight, 0.0)
    # Running sums of one row use no number of another, unlike sums whose split over threads depends on the shape.
    running = weight.cumsum_(-1)
    total = running[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(running, target, right=True)[:, 0].clamp_max_(logits.shape[1] - 1)
    out.index_copy_(0, params.table[6].to(torch.int64), chosen)
