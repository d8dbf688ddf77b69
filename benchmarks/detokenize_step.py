"""Time of one detokenizer step: decode the report's frame, texts of 64 rows, encode what goes to http.

`python -m benchmarks.detokenize_step --model-dir FOLDER` prints microseconds a token without and with stop strings;
FOLDER holds a tokenizer.json. No sockets: what ZMQ adds is in `benchmarks.chain`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from inferserve.config.schema import ModelFacts, ServerConfig
from inferserve.detokenize.loop import Detokenizer
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import (
    DetokMessage,
    HttpMessage,
    KvCounters,
    RouterMessage,
    StepReport,
    StopMatched,
    TextReady,
)
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, encode_params
from inferserve.tokenize.load import Tokenizer, load_tokenizer

_ROWS = 64
_TOKENS = 500
_STOPS = ("\n\nUser:", "</answer>", "<|im_end|>", "###")


class _Discard:
    """An outbox that encodes and throws away."""

    def __init__(self, union: object) -> None:
        self._codec: Codec[TextReady | StopMatched] = Codec(union)

    def send(self, message: TextReady | StopMatched) -> None:
        """Encode."""
        self._codec.encode(message)


def measure(tokenizer: Tokenizer, stops: tuple[str, ...]) -> float:
    """Microseconds a token, over a run of `_TOKENS` steps."""
    table, _ = SlotTable.create(_ROWS, _TOKENS)
    http, engine = table.view(Writer.HTTP), table.view(Writer.ENGINE)
    raw = encode_params(SamplingParams(stop=stops))
    http.params[:, : len(raw)] = np.frombuffer(raw, np.uint8)
    http.params_len[:] = len(raw)
    http.generation[:] = 1
    choice = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (_ROWS, _TOKENS))
    engine.output_ids[:] = choice
    slots, generations = np.arange(_ROWS, dtype=np.int32).tobytes(), np.ones(_ROWS, np.uint32).tobytes()
    codec: Codec[StepReport] = Codec(DetokMessage)
    frames = [
        codec.encode(
            StepReport(n, slots, generations, np.full(_ROWS, n, np.int32).tobytes(), KvCounters(1, 1, 0, 0, _ROWS, 0))
        )
        for n in range(1, _TOKENS + 1)
    ]
    subject = Detokenizer(
        table.view(Writer.DETOKENIZE), tokenizer, _ROWS, [_Discard(HttpMessage)], _Discard(RouterMessage)
    )
    began = time.process_time()
    for frame in frames:
        subject.handle(codec.decode(frame))
    return (time.process_time() - began) / (_ROWS * _TOKENS) * 1e6


def main() -> None:
    """Print the medians of seven runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    tokenizer = load_tokenizer(ServerConfig(facts=ModelFacts(folder=parser.parse_args().model_dir)))
    for name, stops in (("no stop strings", ()), (f"{len(_STOPS)} stop strings", _STOPS)):
        figures = [measure(tokenizer, stops) for _ in range(7)]
        print(f"{name}: {statistics.median(figures):.2f} µs a token (min {min(figures):.2f}, max {max(figures):.2f})")


if __name__ == "__main__":
    main()
