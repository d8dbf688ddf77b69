"""Drives an `EngineBackend` over the real KV ledger: the least scheduler that can batch, chunk, share and pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferserve.engine.step import FROM_DEVICE, EngineBackend, StepBatch
from inferserve.kv.ledger import KvLedger
from inferserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


@dataclass
class Sequence_:
    """One prompt on its way."""

    prompt: list[int]
    row: int
    output: list[int] = field(default_factory=list)
    on_device: bool = False

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.prompt + self.output, dtype=np.int32)


class Driver:
    """Steps over one backend and one ledger; both outlive a call of `generate`, so prefixes carry over."""

    def __init__(
        self, backend: EngineBackend, *, kv_tokens: int, max_rows: int, max_len: int, prefix_cache: bool, chunk: int
    ) -> None:
        self.backend = backend
        self.ledger = KvLedger(kv_tokens, max_rows, max_len, prefix_cache)
        self.chunk = chunk
        self.hits = 0
        self.steps = 0
        self._rows = list(range(max_rows))

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int, pause_every: int = 0
    ) -> list[tuple[int, ...]]:
        """Greedy tokens of each prompt, at most `batch` at once; every `pause_every` steps one row is paused."""
        waiting = [Sequence_(list(p), -1) for p in prompts]
        everything, running = list(waiting), []
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(self._open(waiting.pop(0)))
            self._step(running)
            for done in [s for s in running if len(s.output) >= new_tokens]:
                running.remove(done)
                self._close(done)
            if pause_every and self.steps % pause_every == 0 and running:
                paused = running.pop(0)
                self._close(paused)
                waiting.append(paused)
        return [tuple(s.output) for s in everything]

    def _open(self, sequence: Sequence_) -> Sequence_:
        sequence.row = self._rows.pop()
        sequence.on_device = False
        self.hits += self.ledger.open(sequence.row, sequence.tokens)
        self.backend.open_row(
            sequence.row, GREEDY, np.array(sequence.prompt, np.int32), np.array(sequence.output, np.int32)
        )
        return sequence

    def _close(self, sequence: Sequence_) -> None:
        length = int(self.ledger.length[sequence.row])
        self.ledger.close(sequence.row, sequence.tokens[:length])
        self.ledger.check()
        self.backend.close_row(sequence.row)
        self._rows.append(sequence.row)

    def _step(self, running: list[Sequence_]) -> None:
        left = {id(s): len(s.tokens) - int(self.ledger.length[s.row]) for s in running}
        decode = [s for s in running if left[id(s)] == 1 and s.output]
        order = decode + [s for s in running if s not in decode]
        counts = np.array([min(left[id(s)], self.chunk) for s in order], np.int32)
        rows = np.array([s.row for s in order], np.int32)
        _, positions, index = self.ledger.extend(rows, counts)
        ids = np.concatenate(
            [s.tokens[p : p + n] for s, p, n in zip(order, self.ledger.length[rows] - counts, counts, strict=True)]
        ).astype(np.int32)
        for i, sequence in enumerate(decode):
            if sequence.on_device and self.steps % 2:
                ids[i] = FROM_DEVICE
        sample = np.array([i for i, s in enumerate(order) if counts[i] == left[id(s)]], np.int32)
        done = self.backend.launch(
            StepBatch(
                step=self.steps,
                rows=rows,
                num_decode=len(decode),
                query_len=counts,
                kv_len=self.ledger.length[rows],
                token_ids=ids,
                positions=positions,
                kv_index=index,
                table=self.ledger.table,
                new_prefix=self.ledger.take_new_prefixes(),
                sample=sample,
                out_position=np.array([len(order[i].output) for i in sample], np.int32),
            )
        ).result()
        assert not done.failed.any()
        for i, token in zip(sample, done.token_ids, strict=True):
            order[i].output.append(int(token))
            order[i].on_device = True
        self.steps += 1
