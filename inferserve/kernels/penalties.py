"""Repetition, presence and frequency penalties on some rows of logits, from the tokens those rows have said.

A row's history is the distinct tokens of its prompt, then every output token; costs go by its length, not by the size
of the vocabulary.

    repetition: l / r if l > 0 else l * r, for tokens of prompt or output (CTRL, arXiv 1909.05858, section 4.1)
    presence, frequency: l - presence * [count > 0] - frequency * count, over output tokens (OpenAI API reference)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferserve.kernels.logit_pieces import PENALTIES


@dataclass(frozen=True)
class PenaltyParams:
    """Whom to penalise and how, one column a row.

    Attributes:
        table: int32 [8, N] on the device: which row of the logits, which sampled row, which line
            of the histories, prompt's share of that line, its length; the bits of float32 repetition, presence,
            frequency.
        longest: host's largest length.
    """

    table: torch.Tensor
    longest: int


@triton.jit
def _repeated(value: tl.tensor, repetition: tl.tensor) -> tl.tensor:
    return tl.where(value > 0, value / repetition, value * repetition)


@triton.jit(do_not_specialize=["rows", "line_length", "longest"])
def _penalise_kernel(
    work: tl.tensor,
    table: tl.tensor,
    history: tl.tensor,
    before: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    line_length: tl.tensor,
    longest: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row. Tokens repeat within a history, so all logits are read before the first is written, and what is written
    twice is the same number; frequencies alone add up."""
    table += tl.program_id(0)
    work += tl.load(table).to(tl.int64) * width
    history += tl.load(table + 2 * rows).to(tl.int64) * line_length
    before += tl.program_id(0).to(tl.int64) * longest
    prompt, total = tl.load(table + 3 * rows), tl.load(table + 4 * rows)
    repetition = tl.load(table + 5 * rows).to(tl.float32, bitcast=True)
    presence = tl.load(table + 6 * rows).to(tl.float32, bitcast=True)
    frequency = tl.load(table + 7 * rows).to(tl.float32, bitcast=True)
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(history + at, mask=at < total, other=0)
        tl.store(before + at, tl.load(work + token, mask=at < total, other=0.0), mask=at < total)
    tl.debug_barrier()
    for start in range(0, prompt, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(history + at, mask=at < prompt, other=0)
        value = tl.load(before + at, mask=at < prompt, other=0.0)
        tl.store(work + token, _repeated(value, repetition), mask=at < prompt)
    tl.debug_barrier()
    for start in range(prompt, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(history + at, mask=at < total, other=0)
        value = tl.load(before + at, mask=at < total, other=0.0)
        tl.store(work + token, _repeated(value, repetition) - presence, mask=at < total)
    if frequency != 0.0:
        tl.debug_barrier()
        for start in range(prompt, total, BLOCK):
            at = start + tl.arange(0, BLOCK)
            token = tl.load(history + at, mask=at < total, other=0)
            tl.atomic_add(work + token, tl.zeros((BLOCK,), tl.float32) - frequency, mask=at < total, sem="relaxed")


def penalise(work: torch.Tensor, params: PenaltyParams, history: torch.Tensor) -> None:
    """Penalise rows of `work` in place.

    Args:
        work: float32 [P, width], contiguous.
        history: int64 [lines, places], contiguous; entries in [0, width).
    """
    rows = params.table.shape[1]
    if rows and params.longest:
        before = torch.empty((rows, params.longest), dtype=torch.float32, device=work.device)
        _penalise_kernel[(rows,)](
            work,
            params.table,
            history,
            before,
            rows,
            work.shape[1],
            history.shape[1],
            params.longest,
            BLOCK=PENALTIES.block,
            num_warps=PENALTIES.warps,
        )


@triton.jit(do_not_specialize=["rows", "line_length"])
def _append_kernel(
    history: tl.tensor,
    table: tl.tensor,
    token_ids: tl.tensor,
    rows: tl.tensor,
    line_length: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    token = tl.load(token_ids + tl.load(table + rows + row, mask=live, other=0), mask=live, other=0)
    line = tl.load(table + 2 * rows + row, mask=live, other=0).to(tl.int64)
    place = tl.load(table + 4 * rows + row, mask=live, other=0)
    tl.store(history + line * line_length + place, token, mask=live)


def append_tokens(history: torch.Tensor, params: PenaltyParams, token_ids: torch.Tensor) -> None:
    """Write each row's sampled token behind its history.

    Args:
        history: int64 [lines, places]; every line has a free place.
        token_ids: int64 [S].
    """
    rows = params.table.shape[1]
    if rows:
        grid = (triton.cdiv(rows, PENALTIES.block),)
        _append_kernel[grid](
            history, params.table, token_ids, rows, history.shape[1], BLOCK=PENALTIES.block, num_warps=4
        )


def penalise_ref(work: torch.Tensor, params: PenaltyParams, history: torch.Tensor) -> None:
    """Torch twin of `penalise`."""
    if not params.longest:
        return
    where, _, line, prompt, total = params.table[:5].to(torch.int64)[:, :, None]
    repetition, presence, frequency = params.table[5:].view(torch.float32)[:, :, None]
    column = torch.arange(params.longest, device=work.device)[None, :]
    tokens = history[:, : params.longest].index_select(0, line[:, 0])
    spare, flat = work.shape[1] - 1, work.view(-1)
    base = where * work.shape[1]
    index = base + torch.where(column < total, tokens, spare)
    if bool((repetition != 1.0).any()):
        old = flat[index]
        # Repeated tokens write the same value twice.
        flat[index] = torch.where(old > 0, old / repetition, old * repetition)
    if bool((presence != 0.0).any() or (frequency != 0.0).any()):
        said = (column >= prompt) & (column < total)
        index = base + torch.where(said, tokens, spare)
        flat[index] = flat[index] - presence
        flat.index_add_(0, index.flatten(), (-frequency).expand_as(index).flatten())


def append_tokens_ref(history: torch.Tensor, params: PenaltyParams, token_ids: torch.Tensor) -> None:
    """Torch twin of `append_tokens`."""
    _, sampled, line, _, total = params.table[:5].to(torch.int64)
    history[line, total] = token_ids.index_select(0, sampled)
