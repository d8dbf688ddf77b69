"""An engine backend that proves the KV right, and a rig that drives a `Worker` without sockets.

`KvBackend` keeps for each pool index a hash of all tokens up to that position, computed from the hash that the page
table says is before it. The sampled token depends on that hash, so any wrong table, index or prefix changes the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.step import FROM_DEVICE, BackendFacts, Ints, StepBatch, StepResult, TopAlternatives
from inferserve.engine.worker import Worker
from inferserve.protocol.messages import Admit, Commands, Finish, FinishedRow, SlotRef, StepReport
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, SlotView, encode_params

VOCAB = 1000
EOS = 999
MASK = (1 << 61) - 1


def chain(before: int, token: int) -> int:
    """Hash of a prefix from the hash of the one before it."""
    return (before * 1_000_003 + token + 1) % MASK


def sampled(prefix_hash: int, seed: int, position: int, alphabet: int = VOCAB - 1) -> int:
    """The token that follows a prefix, below `alphabet`; never EOS."""
    return (prefix_hash * 31 + seed * 7919 + position * 104_729) % alphabet


def expected(prompt: Sequence[int], count: int, seed: int = 0, alphabet: int = VOCAB - 1) -> list[int]:
    """What a right engine puts out after `prompt`."""
    state, out = 0, []
    for token in prompt:
        state = chain(state, token)
    for position in range(count):
        out.append(sampled(state, seed, position, alphabet))
        state = chain(state, out[-1])
    return out


@dataclass
class KvBackend:
    """See the module. `forced` and `failing` are by (seed, output position). In a small alphabet guesses come true."""

    kv_tokens: int
    max_rows: int
    max_len: int
    alphabet: int = VOCAB - 1
    forced: dict[tuple[int, int], int] = field(default_factory=dict)
    failing: set[tuple[int, int]] = field(default_factory=set)
    computed: int = 0
    batches: list[StepBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = [-1] * self.kv_tokens
        self.table = np.full((self.max_rows, self.max_len), -1, dtype=np.int32)
        self.newest = [-1] * self.max_rows
        self.params: dict[int, SamplingParams] = {}
        self.sequence: dict[int, list[int]] = {}

    def start(self) -> BackendFacts:
        return BackendFacts(self.kv_tokens, {})

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        assert row not in self.params, f"row {row} opened twice"
        self.params[row] = params
        self.sequence[row] = [*prompt.tolist(), *output.tolist()]

    def close_row(self, row: int) -> None:
        del self.params[row]

    def launch(self, batch: StepBatch) -> ReadyStep:
        self.batches.append(batch)
        self.computed += len(batch.token_ids)
        assert len(batch.rows) == len(set(batch.rows.tolist())) == len(batch.query_len)
        assert batch.query_len.sum() == len(batch.token_ids) == len(batch.positions) == len(batch.kv_index)
        assert (batch.query_len[: batch.num_decode] == 1).all()
        for row, length in batch.new_prefix:
            self.table[row, :length] = batch.table[row, :length]
        start = 0
        for row, n, kv_len in zip(batch.rows.tolist(), batch.query_len.tolist(), batch.kv_len.tolist(), strict=True):
            assert row in self.params, f"row {row} is not open"
            self._compute(row, kv_len, batch, range(start, start + n))
            start += n
        return ReadyStep(self._sample(batch))

    def _compute(self, row: int, kv_len: int, batch: StepBatch, span: Iterable[int]) -> None:
        for t in span:
            position, index = int(batch.positions[t]), int(batch.kv_index[t])
            token = int(batch.token_ids[t])
            if token == FROM_DEVICE:
                token = self.newest[row]
            self.table[row, position] = index
            before = self.pool[self.table[row, position - 1]] if position else 0
            self.pool[index] = chain(before, token)
        assert position == kv_len - 1
        assert self.table[row, :kv_len].tolist() == batch.table[row, :kv_len].tolist(), "device and host table differ"

    def _sample(self, batch: StepBatch) -> StepResult:
        ids, failed, tops = [], [], {}
        sampled_at = batch.sampled_at().tolist()
        for i, (s, position) in enumerate(zip(batch.sample.tolist(), batch.out_position.tolist(), strict=True)):
            row = int(batch.rows[s])
            params = self.params[row]
            state = self.pool[batch.kv_index[sampled_at[i]]]
            key = (params.seed, position)
            token = self.forced.get(key, sampled(state, params.seed, position, self.alphabet))
            checks = np.count_nonzero(batch.sample == s) > 1
            assert params.plain or not checks, "a draft for a row whose tokens do not depend on its logits alone"
            self.newest[row] = -1000 if checks else token
            ids.append(token)
            failed.append(key in self.failing)
            if params.logprobs:
                tops[i] = TopAlternatives((token,) * params.logprobs, (-0.5,) * params.logprobs)
        logprobs = np.full(len(ids), -0.5, dtype=np.float32)
        return StepResult(np.array(ids, dtype=np.int32), logprobs, np.array(failed, dtype=np.bool_), tops)


@dataclass(frozen=True)
class ReadyStep:
    """A step that was run when it was launched, as on one device stream."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


def engine_config(
    *,
    rows: int = 8,
    max_len: int = 64,
    chunk: int = 32,
    batch: int = 64,
    depth: int = 0,
    cache: bool = True,
    whole_prompts: bool = False,
    vocab: int = VOCAB,
    queued: int = 16,
    drafts: int = 0,
) -> ServerConfig:
    """A resolved configuration for an engine alone; `drafts` tokens are guessed at a time."""
    return ServerConfig(
        model=ModelPart(max_req_total_len=max_len, eos_id=(EOS,)),
        engine=EnginePart(
            engine="fake",
            pipeline_depth=depth,
            disable_dynamic_prompt_cache=not cache,
            spec_mode="ngram" if drafts else "none",
            spec_tokens=drafts,
        ),
        schedule=SchedulePart(
            running_max_req_size=rows,
            max_queued_requests=queued,
            batch_max_tokens=batch,
            chunked_prefill_size=chunk,
            disable_chunked_prefill=whole_prompts,
        ),
        facts=ModelFacts(vocab_size=vocab),
    )


def fill_slot(http: SlotView, index: int, prompt: Sequence[int], **params: object) -> SlotRef:
    """Give slot `index` to a new tenant, as http does."""
    http.generation[index] += 1
    http.in_use[index], http.cancelled[index] = 1, 0
    http.prompt_len[index] = len(prompt)
    http.prompt_ids[index, : len(prompt)] = prompt
    data = encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    http.params_len[index] = len(data)
    http.params[index, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    return SlotRef(index, int(http.generation[index]))


class Rig:
    """A worker over a real slot table; plays http and router. Every step is followed by `worker.check()`."""

    def __init__(
        self, kv: int = 512, config: ServerConfig | None = None, alphabet: int = VOCAB - 1, **settings: object
    ) -> None:
        self.config = config or engine_config(**settings)  # type: ignore[arg-type]
        rows, max_len = self.config.schedule.running_max_req_size, self.config.model.max_req_total_len
        self.table, self.segment = SlotTable.create(self.config.slots, max_len)
        self.http, self.slots = self.table.view(Writer.HTTP), self.table.view(Writer.ENGINE)
        self.backend = KvBackend(kv, rows, max_len, alphabet)
        self.worker = Worker(self.config, self.slots, self.backend, kv)
        self.seq = 0
        self.next_slot = 0
        self.reports: list[StepReport] = []
        self.finished: dict[SlotRef, FinishedRow] = {}

    def fill(self, prompt: Sequence[int], **params: object) -> SlotRef:
        """What http does: take a slot and write its columns."""
        index = self.next_slot % self.table.slots
        self.next_slot += 1
        return fill_slot(self.http, index, prompt, **params)

    def command(
        self,
        admit: Iterable[SlotRef] = (),
        abort: Iterable[SlotRef] = (),
        stop: Iterable[SlotRef] = (),
        leader: SlotRef | None = None,
    ) -> None:
        """Send `Commands`; with `leader`, the admitted are its siblings."""
        index = -1 if leader is None else leader.index
        admits = tuple(Admit(ref.index, ref.generation, index) for ref in admit)
        self.worker.apply(Commands(self.seq, admits, tuple(abort), tuple(stop)))
        self.seq += 1
        self.worker.check()

    def submit(self, prompt: Sequence[int], **params: object) -> SlotRef:
        """Fill a slot and admit it."""
        ref = self.fill(prompt, **params)
        self.command(admit=[ref])
        return ref

    def step(self) -> StepReport | None:
        """One turn of the loop."""
        report = self.worker.step()
        self.worker.check()
        if report is not None:
            self.reports.append(report)
            self._verify(report)
        return report

    def _verify(self, report: StepReport) -> None:
        kv = report.kv
        assert kv.used + kv.cached + kv.free == kv.total
        indexes = np.frombuffer(report.slots, dtype=np.int32)
        visible = np.frombuffer(report.visible, dtype=np.int32)
        assert len(set(indexes.tolist())) == len(indexes), "a row is named twice"
        assert len(indexes) == len(visible) == len(np.frombuffer(report.generations, dtype=np.uint32))
        assert (self.slots.visible[indexes] == visible).all()
        for row in report.finished:
            ref = SlotRef(row.index, row.generation)
            assert ref not in self.finished, "reported as finished twice"
            self.finished[ref] = row
            assert self.slots.engine_done[row.index] == row.generation
            assert self.slots.finish[row.index] == row.finish

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.worker.busy:
                self.step()
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def output(self, ref: SlotRef) -> list[int]:
        """Visible output tokens of a slot."""
        return self.slots.output_ids[ref.index, : self.slots.visible[ref.index]].tolist()

    def finish(self, ref: SlotRef) -> Finish:
        """Why the slot's sequence ended."""
        return Finish(self.finished[ref].finish)

    def used(self) -> int:
        """KV tokens that running rows hold."""
        return self.worker.ledger.counters(0, 0).used
