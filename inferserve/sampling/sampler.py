"""`Sampler`: logits of a step's rows to their next tokens. Knows rows and params, no sequences, texts or stop rules.

Order for one row: logprobs are of the raw logits; then logit bias, penalties and the `min_tokens` mask (-inf, which
penalties leave as it is, so it is added together with the bias); then argmax for greedy rows, or temperature, top-k, top-p, min-p and the draw. A plain greedy row takes part in one argmax and
nothing else, whatever its neighbours ask for. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferserve.kernels.dispatch import kernels_for
from inferserve.kernels.sampling_filter import FilterParams
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.greedy import argmax_rows
from inferserve.sampling.penalties import Penalties, has_penalties
from inferserve.sampling.token_edits import TokenEdits
from inferserve.sampling.uniform import uniform
from inferserve.sampling.upload import upload

Ints = NDArray[np.int32]

LOWEST_LOGPROB = -9999.0
"""Stands for the logprob of an impossible token: -inf has no JSON form."""

_ALIGN = 16
"""Rows of the working copy are padded to a multiple of this many floats, one of them spare (see `Penalties`)."""

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.uint64),
        ("drawn", np.bool_),
        ("biased", np.bool_),
        ("penalised", np.bool_),
        ("min_tokens", np.int32),
        ("logprobs", np.int32),
    ]
)
"""What the host knows of a row; `drawn` = not greedy, `logprobs` = alternatives wanted, -1 for no logprobs at all."""

_CLOSED = np.array((0, 1, 0, 1, 0, False, False, False, 0, -1), _ROW)
"""A row that nobody holds is plain greedy."""


@dataclass(frozen=True)
class Tops:
    """Likeliest tokens of the rows that asked for alternatives, likeliest first.

    Attributes:
        index: int [L], which of the S sampled rows.
        counts: int [L], how many each asked for; the tensors hold as many as the greediest asker wanted.
        token_ids: int64 [L, n].
        logprobs: float32 [L, n].
    """

    index: tuple[int, ...]
    counts: tuple[int, ...]
    token_ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Sampled:
    """Results in the order of the rows given, on the device.

    Attributes:
        token_ids: int64 [S], always in [0, vocab).
        logprobs: float32 [S], of the chosen tokens under the raw logits; NaN for rows that did not ask.
        failed: bool [S], the row's logits held NaN or +inf, or nothing but -inf; its token is meaningless.
        tops: None if no row asked for alternatives.
    """

    token_ids: Tensor
    logprobs: Tensor
    failed: Tensor
    tops: Tops | None


class Sampler:
    """Sampling state of all running rows, each of at most `max_len` tokens.

    State on the device is touched in inference mode alone, whatever mode the caller is in: a tensor that was made
    there cannot be changed outside.
    """

    def __init__(
        self, max_rows: int, max_len: int, vocab_size: int, device: torch.device, eos_ids: Sequence[int]
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows = np.full(max_rows, _CLOSED)
        self._edits = TokenEdits(vocab_size, eos_ids)
        self._penalties = Penalties(max_rows, max_len, vocab_size, device)
        self._filter_sample = kernels_for(device).filter_sample

    @torch.inference_mode()
    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """A sequence takes `row`; `output` (int32, like `prompt`) is what it has said before a pause."""
        self.close_row(row)
        penalised = has_penalties(params)
        top_k = self._vocab_size if params.top_k < 1 else min(params.top_k, self._vocab_size)
        logprobs = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._rows[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            top_k,
            params.seed,
            not params.greedy,
            bool(params.logit_bias),
            penalised,
            params.min_tokens,
            logprobs,
        )
        self._edits.open(row, params)
        if penalised:
            self._penalties.open(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        """The sequence left `row`."""
        self._rows[row] = _CLOSED
        self._edits.close(row)
        self._penalties.close(row)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Ints, out_position: Ints) -> Sampled:
        """One token for each row.

        Args:
            logits: [S, vocab] float; not changed.
            rows: int32 [S], open rows.
            out_position: int32 [S], output position of the token to choose.
        """
        state = self._rows[rows]
        masked = out_position < state["min_tokens"]
        edited = state["biased"] | state["penalised"] | masked
        special = np.flatnonzero(edited | state["drawn"])
        everyone = len(special) == len(rows) > 0
        token_ids, peak = (None, logits.amax(-1)) if everyone else argmax_rows(logits)
        if len(special):
            work = self._edit(logits, special, rows, state, masked) if edited.any() else take(logits, special)
            chosen = self._choose(work, state[special], out_position[special])
            token_ids = chosen if token_ids is None else token_ids.index_copy_(0, self._upload(special), chosen)
        assert token_ids is not None
        penalised = np.flatnonzero(state["penalised"])
        if len(penalised):
            self._penalties.append(rows[penalised], take(token_ids, penalised))
        logprobs, tops = self._logprobs(logits, token_ids, state["logprobs"])
        return Sampled(token_ids, logprobs, torch.isfinite(peak).logical_not_(), tops)

    def _edit(
        self, logits: Tensor, special: NDArray[np.intp], rows: Ints, state: NDArray[Any], masked: NDArray[np.bool_]
    ) -> Tensor:
        """Float32 [P, vocab]: copies of the special rows with bias, penalties and mask applied."""
        width = (self._vocab_size + _ALIGN) // _ALIGN * _ALIGN
        work = torch.empty((len(special), width), dtype=torch.float32, device=logits.device)
        work[:, : self._vocab_size].copy_(take(logits, special))
        work[:, self._vocab_size :].zero_()
        which, flags = rows[special], state[special]
        self._edits.apply(work, pairs(flags["biased"], which), pairs(masked[special], which))
        penalised = np.flatnonzero(flags["penalised"])
        if len(penalised):
            self._penalties.apply(work, penalised, which[penalised])
        return work[:, : self._vocab_size]

    def _choose(self, work: Tensor, state: NDArray[Any], out_position: Ints) -> Tensor:
        """int64 [P]: argmax of greedy rows, a draw for the others."""
        drawn = np.flatnonzero(state["drawn"])
        if not len(drawn):
            return argmax_rows(work)[0]
        if len(drawn) == len(state):
            return self._draw(work, state, out_position)
        token_ids = argmax_rows(work)[0]
        chosen = self._draw(take(work, drawn), state[drawn], out_position[drawn])
        return token_ids.index_copy_(0, self._upload(drawn), chosen)

    def _draw(self, work: Tensor, state: NDArray[Any], out_position: Ints) -> Tensor:
        top_k = state["top_k"]
        by_k = top_k < self._vocab_size
        # One upload for all: the integers travel as the bits of floats.
        columns = (state["temperature"], state["top_p"], state["min_p"], uniform(state["seed"], out_position))
        numbers = self._upload(np.stack((*columns, top_k.copy().view(np.float32))))
        params = FilterParams(
            temperature=numbers[0],
            top_p=numbers[1],
            min_p=numbers[2],
            top_k=numbers[4].view(torch.int32),
            filtered=bool((by_k | (state["top_p"] < 1.0) | (state["min_p"] > 0.0)).any()),
            max_top_k=int(top_k[by_k].max(initial=0)),
        )
        return self._filter_sample(work, params, numbers[3])

    def _logprobs(self, logits: Tensor, token_ids: Tensor, wanted: Ints) -> tuple[Tensor, Tops | None]:
        logprobs = torch.full(token_ids.shape, torch.nan, dtype=torch.float32, device=logits.device)
        askers = np.flatnonzero(wanted >= 0)
        if not len(askers):
            return logprobs, None
        index = self._upload(askers)
        raw = logits.index_select(0, index).float()
        norm = raw.logsumexp(-1, keepdim=True)
        chosen = raw.gather(1, token_ids.index_select(0, index)[:, None]) - norm
        logprobs.index_copy_(0, index, chosen[:, 0].clamp_(min=LOWEST_LOGPROB))
        counts = wanted[askers]
        listed = np.flatnonzero(counts > 0)
        if not len(listed):
            return logprobs, None
        values, ids = take(raw, listed).topk(int(counts.max()), dim=-1)
        values = (values - take(norm, listed)).clamp_(min=LOWEST_LOGPROB)
        return logprobs, Tops(tuple(askers[listed].tolist()), tuple(counts[listed].tolist()), ids, values)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)


def take(x: Tensor, index: NDArray[np.intp]) -> Tensor:
    """Rows `index` of x (ascending, distinct); x itself when they are all of them."""
    return x if len(index) == x.shape[0] else x.index_select(0, upload(index, x.device))


def pairs(flags: NDArray[np.bool_], rows: Ints) -> list[tuple[int, int]]:
    """(index, row) where the flag is set."""
    return [(i, int(rows[i])) for i in np.flatnonzero(flags).tolist()]
