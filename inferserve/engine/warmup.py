"""Made-up steps that do what real ones do: they compile kernels, fill allocators and show the peak of memory.

What a kernel is compiled for besides the model: whether a context is long enough to be split, whether a chunk has a
prefix, what the sampling filter reads (the model's logits, edited copies, some rows of such), and one token instead of
many. Nothing here reads results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from inferserve.config.schema import ServerConfig
from inferserve.engine.step import FROM_DEVICE, EngineBackend, Ints, StepBatch
from inferserve.protocol.sampling import MAX_TOP_LOGPROBS, SamplingParams

TOKEN = 1
_SHORT = 2

_GREEDY = SamplingParams(temperature=0.0)
_DRAWN = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, seed=1)
_GREEDY_EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1)
_EVERYTHING = SamplingParams(
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    seed=1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={TOKEN: 1.0},
    min_tokens=16,
    max_tokens=16,
    logprobs=MAX_TOP_LOGPROBS,
)


KINDS = (_GREEDY, _DRAWN, _EVERYTHING, _GREEDY_EDITED)
"""One row of each kind of sampling."""


@dataclass(frozen=True)
class Extent:
    """The most that steps may ask for.

    Attributes:
        rows: sequences that run at once.
        length: tokens of one sequence.
        tokens: query tokens of a step.
        chunk: query tokens of one sequence in a step.
    """

    rows: int
    length: int
    tokens: int
    chunk: int

    @property
    def places(self) -> int:
        """KV tokens that the steps write to, from 0."""
        return self.length + self.tokens


def largest(config: ServerConfig, rows: int) -> Extent:
    """What the configuration allows."""
    schedule, length = config.schedule, config.model.max_req_total_len
    tokens = schedule.batch_max_tokens or length
    if schedule.disable_chunked_prefill:
        return Extent(rows, length, max(tokens, length), length)
    return Extent(rows, length, tokens, min(schedule.chunked_prefill_size or length, length, tokens))


def small(config: ServerConfig, rows: int) -> Extent:
    """Enough to run every kind of code once."""
    length = min(16, config.model.max_req_total_len)
    return Extent(min(4, rows), length, length + 4, length)


def phases(backend: EngineBackend, table: Ints, extent: Extent) -> Iterator[str]:
    """Run the steps phase by phase; yields the name of each before it starts.

    Args:
        table: int32 [rows, length] or larger, written to.
    """
    row, every = (_GREEDY,), extent.rows
    yield "one row"
    steps = [step(table, _SHORT, 0, (1,)), step(table, _SHORT, 1, ()), step(table, extent.length, 1, ())]
    behind = min(extent.chunk, extent.length - extent.length // 3)
    prompts = [
        step(table, _SHORT, 0, (extent.chunk,)),
        step(table, extent.length, 0, (behind,), extent.length - behind),
    ]
    _run(backend, row, 0, [*prompts, *steps])
    yield "sampling"
    kinds = (_DRAWN, _EVERYTHING, _GREEDY_EDITED, _GREEDY)
    for chosen in ((_DRAWN,), (_EVERYTHING,), kinds[1:3], kinds):
        few = min(len(chosen), every, extent.tokens)
        _run(backend, chosen[:few], 0, [step(table, _SHORT, few, ())])
    yield "largest steps"
    decode, chunks = _largest_mix(extent)
    alone = min(every, extent.tokens)
    # Attention of a long chunk may gather all that is before it.
    before = extent.length - chunks[0]
    steps = [step(table, extent.length, decode, chunks, before), step(table, extent.length, alone, ())]
    _run(backend, (_EVERYTHING,) * every, max(0, extent.length - 1 - len(steps)), steps)


def _run(backend: EngineBackend, params: Sequence[SamplingParams], said: int, steps: Sequence[StepBatch]) -> None:
    """Row i has `params[i]`, a prompt of one token and `said` tokens of output behind it."""
    prompt, output = np.full(1, TOKEN, np.int32), np.full(said, TOKEN, np.int32)
    for row, own in enumerate(params):
        backend.open_row(row, own, prompt, output)
    for batch in steps:
        backend.launch(batch).result()
    for row in range(len(params)):
        backend.close_row(row)


def _largest_mix(extent: Extent) -> tuple[int, tuple[int, ...]]:
    """Decode rows and chunks of a step with all its tokens, in as many rows as may be."""
    prefill = min(extent.rows, -(-extent.tokens // extent.chunk))
    decode = max(0, min(extent.rows - prefill, extent.tokens - prefill))
    left = min(extent.tokens - decode, prefill * extent.chunk)
    return decode, tuple(left // prefill + (i < left % prefill) for i in range(prefill))


def step(table: Ints, length: int, decode: int, chunks: Sequence[int], before: int = 0) -> StepBatch:
    """Rows [0, decode) compute their `length`-th token, then one row for each chunk its first tokens, the first of them
    those behind `before` others, fewer than `length`; all sample.

    Contexts share their places; `length + decode + sum(chunks)` places are enough.
    """
    rows = np.arange(decode + len(chunks), dtype=np.int32)
    query_len = np.array([1] * decode + list(chunks), np.int32)
    prefix = np.array([length - 1] * decode + [before] * (len(chunks) > 0) + [0] * (len(chunks) - 1), np.int32)
    positions = np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(prefix, query_len, strict=True)])
    kv_index = np.arange(length - 1, length - 1 + len(positions), dtype=np.int32)
    for row in rows:
        table[row, : prefix[row]] = np.arange(prefix[row], dtype=np.int32)
    table[np.repeat(rows, query_len), positions] = kv_index
    return StepBatch(
        step=0,
        rows=rows,
        num_decode=decode,
        query_len=query_len,
        kv_len=prefix + query_len,
        token_ids=np.array([FROM_DEVICE] * decode + [TOKEN] * sum(chunks), np.int32),
        positions=positions,
        kv_index=kv_index,
        table=table,
        new_prefix=tuple((row, known) for row, known in enumerate(prefix.tolist()) if known),
        sample=rows.copy(),
        out_position=np.ones(len(rows), np.int32),
    )
