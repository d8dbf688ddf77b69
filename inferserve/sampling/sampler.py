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
from inferserve.sampling.draws import DrawParams
from inferserve.sampling.penalties import Penalties, has_penalties
from inferserve.sampling.token_edits import TokenEdits
from inferserve.sampling.upload import upload

Ints = NDArray[np.int32]
Indexes = NDArray[np.intp]
Kinds = NDArray[np.uint8]

_ALIGN = 16
"""Rows of the working copy are padded to a multiple of this many floats, one of them spare (see `Penalties`)."""


# What a row needs beside the argmax of its logits: bits of its kind.
_DRAWN, _BIASED, _PENALISED, _SHORT, _LOGPROBS = 1, 2, 4, 8, 16
_EDITED = _BIASED | _PENALISED | _SHORT


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
        self._kinds = np.zeros(max_rows, np.uint8)
        self._draws = DrawParams(max_rows, vocab_size)
        self._min_tokens = np.zeros(max_rows, np.int32)
        self._alternatives = np.zeros(max_rows, np.int32)
        self._edits = TokenEdits(vocab_size, eos_ids)
        self._penalties = Penalties(max_rows, max_len, vocab_size, device)
        self._kernels = kernels_for(device)

    @torch.inference_mode()
    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """A sequence takes `row`; `output` (int32, like `prompt`) is what it has said before a pause."""
        self.close_row(row)
        kinds = {
            _DRAWN: not params.greedy,
            _BIASED: bool(params.logit_bias),
            _PENALISED: has_penalties(params),
            _SHORT: params.min_tokens > 0,
            _LOGPROBS: params.logprobs is not None,
        }
        self._kinds[row] = sum(kind for kind, wanted in kinds.items() if wanted)
        self._draws.open(row, params)
        self._min_tokens[row] = params.min_tokens
        self._alternatives[row] = min(params.logprobs or 0, self._vocab_size)
        self._edits.open(row, params)
        if kinds[_PENALISED]:
            self._penalties.open(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        """The sequence left `row`."""
        self._kinds[row] = 0
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
        kinds = self._kinds[rows]
        some = int(np.bitwise_or.reduce(kinds))
        token_ids, failed = self._kernels.argmax(logits)
        if some & _SHORT:
            # Long enough by now: nothing to mask.
            kinds = np.where(out_position < self._min_tokens[rows], kinds, kinds & ~np.uint8(_SHORT))
        edited = (kinds & _EDITED) != 0
        which = np.flatnonzero(edited)
        if len(which):
            self._choose_edited(logits, which, kinds, rows, out_position, token_ids)
        if some & _DRAWN:
            plain = np.flatnonzero(((kinds & _DRAWN) != 0) & ~edited)
            self._draw(logits, plain, plain, rows, out_position, token_ids)
        logprobs = torch.full(token_ids.shape, torch.nan, dtype=torch.float32, device=self._device)
        tops = None
        if some & _LOGPROBS:
            tops = self._logprobs(logits, token_ids, np.flatnonzero(kinds & _LOGPROBS), rows, logprobs)
        return Sampled(token_ids, logprobs, failed, tops)

    def _choose_edited(
        self, logits: Tensor, which: Indexes, kinds: Kinds, rows: Ints, out_position: Ints, out: Tensor
    ) -> None:
        """Tokens of the rows `which`, chosen from changed copies of their logits, into `out`, int64 [S]."""
        index = self._upload(which)
        width = (self._vocab_size + _ALIGN) // _ALIGN * _ALIGN
        work = torch.empty((len(which), width), dtype=torch.float32, device=self._device)
        changed = work[:, : self._vocab_size]
        changed.copy_(logits if len(which) == logits.shape[0] else logits.index_select(0, index))
        own, own_rows = kinds[which], rows[which]
        self._edits.apply(work, (own & _BIASED) != 0, (own & _SHORT) != 0, own_rows)
        penalised = np.flatnonzero(own & _PENALISED)
        history = None
        if len(penalised):
            history = self._penalties.apply(work, penalised, which[penalised], own_rows[penalised])
        drawn = np.flatnonzero(own & _DRAWN)
        if len(drawn) < len(which):
            out.index_copy_(0, index, self._kernels.argmax(changed)[0])
        self._draw(changed, drawn, which[drawn], rows, out_position, out)
        if history is not None:
            self._penalties.append(history, out)

    def _draw(
        self, logits: Tensor, source: Indexes, target: Indexes, rows: Ints, out_position: Ints, out: Tensor
    ) -> None:
        """Draw from the lines `source` of the logits for the sampled rows `target`; into `out`, int64 [S]."""
        if len(source):
            columns = self._draws.columns(source, target, rows[target], out_position[target])
            params = FilterParams(
                self._upload(columns.table), columns.filtered, columns.max_top_k, len(source) == logits.shape[0]
            )
            self._kernels.filter_sample(logits, params, out)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, askers: Indexes, rows: Ints, logprobs: Tensor
    ) -> Tops | None:
        """Fill float32 [S] where rows asked."""
        counts = self._alternatives[rows[askers]]
        most = int(counts.max())
        ids, values = self._kernels.logprobs(logits, self._upload(askers), token_ids, logprobs, most)
        if not most:
            return None
        listed = np.flatnonzero(counts)
        if len(listed) < len(askers):
            index = self._upload(listed)
            ids, values = ids.index_select(0, index), values.index_select(0, index)
        return Tops(tuple(askers[listed].tolist()), tuple(counts[listed].tolist()), ids, values)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)
