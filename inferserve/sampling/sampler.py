"""`Sampler`: logits of a step's rows to their next tokens. Knows rows and params, no sequences, texts or stop rules.

Order for one row: logprobs are of the raw logits; then logit bias, penalties and the `min_tokens` mask (-inf, which
penalties leave as it is, so it is added together with the bias); then argmax for greedy rows, or temperature, top-k,
top-p, min-p and the draw. A plain greedy row takes part in one argmax and nothing else, whatever its neighbours ask
for; a row without bias, penalties or mask is drawn from the logits where they lie. Nothing here waits for the device,
and what a step needs there goes over in few copies: launches and copies are what sampling costs the host.
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
from inferserve.sampling.penalties import Penalties, has_penalties
from inferserve.sampling.token_edits import TokenEdits
from inferserve.sampling.uniform import uniform
from inferserve.sampling.upload import upload

Ints = NDArray[np.int32]
Indexes = NDArray[np.intp]

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
        self._kernels = kernels_for(device)

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
        token_ids, failed = self._kernels.argmax(logits)
        which = np.flatnonzero(edited)
        if len(which):
            work = self._copy(logits, which)
            self._edits.apply(work, pairs(state["biased"][which], rows[which]), pairs(masked[which], rows[which]))
            self._choose(work, which, rows, state, out_position, token_ids)
        plain = np.flatnonzero(state["drawn"] & ~edited)
        if len(plain):
            self._draw(logits, plain, plain, state, out_position, token_ids)
        logprobs, tops = self._logprobs(logits, token_ids, state["logprobs"])
        return Sampled(token_ids, logprobs, failed, tops)

    def _copy(self, logits: Tensor, which: Indexes) -> Tensor:
        """Float32 [E, width], the rows `which` to be changed; entries past the vocabulary are zero."""
        width = (self._vocab_size + _ALIGN) // _ALIGN * _ALIGN
        work = torch.empty((len(which), width), dtype=torch.float32, device=logits.device)
        work[:, : self._vocab_size].copy_(
            logits if len(which) == logits.shape[0] else logits.index_select(0, self._upload(which))
        )
        work[:, self._vocab_size :].zero_()
        return work

    def _choose(
        self, work: Tensor, which: Indexes, rows: Ints, state: NDArray[Any], out_position: Ints, out: Tensor
    ) -> None:
        """Penalise copies of the rows `which` and write their tokens to `out`, int64 [S]."""
        penalised = np.flatnonzero(state["penalised"][which])
        history = None
        if len(penalised):
            history = self._penalties.apply(work, penalised, which[penalised], rows[which[penalised]])
        logits = work[:, : self._vocab_size]
        drawn = np.flatnonzero(state["drawn"][which])
        if len(drawn) < len(which):
            out.index_copy_(0, self._upload(which), self._kernels.argmax(logits)[0])
        if len(drawn):
            self._draw(logits, drawn, which[drawn], state, out_position, out)
        if history is not None:
            self._penalties.append(history, out)

    def _draw(
        self, logits: Tensor, source: Indexes, target: Indexes, state: NDArray[Any], out_position: Ints, out: Tensor
    ) -> None:
        """Rows `source` of the logits to entries `target` of `out`, int64 [S]."""
        own = state[target]
        top_k = own["top_k"]
        by_k = top_k < self._vocab_size
        draws = uniform(own["seed"], out_position[target])
        table = FilterParams.columns(own["temperature"], own["top_p"], own["min_p"], draws, top_k, source, target)
        params = FilterParams(
            table=self._upload(table),
            filtered=bool((by_k | (own["top_p"] < 1.0) | (own["min_p"] > 0.0)).any()),
            max_top_k=int(top_k[by_k].max(initial=0)),
            whole=len(source) == logits.shape[0],
        )
        self._kernels.filter_sample(logits, params, out)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, wanted: Ints) -> tuple[Tensor, Tops | None]:
        logprobs = torch.full(token_ids.shape, torch.nan, dtype=torch.float32, device=logits.device)
        askers = np.flatnonzero(wanted >= 0)
        if not len(askers):
            return logprobs, None
        counts = wanted[askers]
        most = int(counts.max())
        ids, values = self._kernels.logprobs(logits, self._upload(askers), token_ids, logprobs, most)
        if not most:
            return logprobs, None
        listed = np.flatnonzero(counts > 0)
        if len(listed) < len(askers):
            index = self._upload(listed)
            ids, values = ids.index_select(0, index), values.index_select(0, index)
        return logprobs, Tops(tuple(askers[listed].tolist()), tuple(counts[listed].tolist()), ids, values)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)


def pairs(flags: NDArray[np.bool_], rows: Ints) -> list[tuple[int, int]]:
    """(index, row) where the flag is set."""
    return [(i, int(rows[i])) for i in np.flatnonzero(flags).tolist()]
