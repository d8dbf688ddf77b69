"""`FakeBackend`: an engine backend without a model, for tests and for measuring everything around the model.

The token at output position p of a row is f(seed, prompt, p): it depends neither on the batch nor on pauses. With a
period q it is f(seed, prompt, p modulo q), so that guessing from what was said before succeeds. Tokens are
ids whose text is printable on its own and that are neither special nor eos, so texts are stable and end by max_tokens.
Steps take a settable time on a pretended device, which works while the host goes on. Knows no slots and no KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from inferserve.config.schema import ServerConfig
from inferserve.engine.step import BackendFacts, Ints, StepBatch, StepResult, TopAlternatives
from inferserve.errors import ConfigError
from inferserve.protocol.sampling import SamplingParams
from inferserve.protocol.seeds import GOLDEN, Words, mix
from inferserve.tokenize.load import Tokenizer, load_tokenizer

DEFAULT_KV_TOKENS = 1 << 20

Clock = Callable[[], float]


def printable_ids(tokenizer: Tokenizer, vocab_size: int) -> Ints:
    """Ids below `vocab_size` whose bytes are printable UTF-8 text by themselves, without special ones; int32 [n], sorted."""
    found = []
    for token_id in range(min(vocab_size, tokenizer.vocab_size)):
        if token_id in tokenizer.special_ids or token_id in tokenizer.eos_ids:
            continue
        try:
            text = tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            continue
        if text and text.isprintable():
            found.append(token_id)
    return np.array(found, dtype=np.int32)


@dataclass(frozen=True)
class FakeStep:
    """A step whose results are known and which is over at `ends`, seconds of `clock`."""

    outcome: StepResult
    ends: float
    clock: Clock
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        """Wait until the step is over."""
        left = self.ends - self.clock()
        if left > 0:
            self.sleep(left)
        return self.outcome


class FakeBackend:
    """See the module.

    Args:
        config: resolved; says how long a step takes and how large the KV pool pretends to be.
        max_rows: number of rows.
        vocabulary: int32 [n], the ids to choose from; None takes the printable ones of the model's tokenizer.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_rows: int,
        vocabulary: Ints | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._vocabulary = np.zeros(0, dtype=np.int32) if vocabulary is None else vocabulary
        self._period = config.engine.fake_period or 2**31 - 1
        self._step_seconds = config.engine.fake_step_ms / 1000
        self._clock = clock
        self._sleep = sleep
        self._base: Words = np.zeros(max_rows, dtype=np.uint64)
        self._alternatives: Ints = np.full(max_rows, -1, dtype=np.int32)
        self._device_free = 0.0

    def start(self) -> BackendFacts:
        """Read the vocabulary. Raises ConfigError when nothing in it is printable."""
        if not len(self._vocabulary):
            self._vocabulary = printable_ids(load_tokenizer(self._config), self._config.facts.vocab_size)
        if not len(self._vocabulary):
            raise ConfigError(f"--engine fake: {self._config.facts.folder} has no token that is printable by itself")
        about: dict[str, str | int | float] = {"engine": "fake", "fake_step_ms": self._config.engine.fake_step_ms}
        return BackendFacts(self._config.engine.fake_kv_tokens or DEFAULT_KV_TOKENS, about)

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:  # noqa: ARG002
        """Remember what the row's tokens depend on."""
        digest = blake2b(prompt.tobytes(), key=params.seed.to_bytes(8, "little"), digest_size=8).digest()
        self._base[row] = int.from_bytes(digest, "little")
        self._alternatives[row] = -1 if params.logprobs is None else params.logprobs

    def close_row(self, row: int) -> None:
        """Forget the row."""
        self._alternatives[row] = -1

    def launch(self, batch: StepBatch) -> FakeStep:
        """Start a step when the pretended device is done with those before."""
        rows = batch.rows[batch.sample]
        position = (batch.out_position % self._period).astype(np.uint64)
        words = mix(self._base[rows] + (position + np.uint64(1)) * GOLDEN)
        picks = (words % np.uint64(len(self._vocabulary))).astype(np.int64)
        wants = self._alternatives[rows]
        logprobs = np.full(len(rows), np.nan, dtype=np.float32)
        tops = {}
        for i in np.flatnonzero(wants >= 0).tolist():
            logprobs[i] = -float(words[i] >> np.uint64(40)) / 2**24
            if wants[i]:
                tops[i] = self._top(int(picks[i]), float(logprobs[i]), int(wants[i]))
        failed = np.zeros(len(rows), dtype=np.bool_)
        outcome = StepResult(self._vocabulary[picks], logprobs, failed, tops)
        self._device_free = max(self._device_free, self._clock()) + self._step_seconds
        return FakeStep(outcome, self._device_free, self._clock, self._sleep)

    def _top(self, pick: int, logprob: float, count: int) -> TopAlternatives:
        """The chosen token and its neighbours in the vocabulary, each half as likely as the one before."""
        ids = tuple(int(self._vocabulary[(pick + j) % len(self._vocabulary)]) for j in range(count))
        return TopAlternatives(ids, tuple(logprob - 0.6931472 * j for j in range(count)))
