"""SmolLM2 on the CPU: streams of the real server over HTTP against transformers' `generate`, same dtype and threads.

`python -m benchmarks.cpu_speed` starts the server on the demo model, loads the same GGUF file in transformers in this
process, and lets them work in turn: one `generate`, one stream, eight streams, and again. While one works the other
is idle. Rates are new tokens over the whole time of a request, prompt included; every round has fresh prompts, so the
prefix cache helps nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.serving import Server, write_result
from benchmarks.stream_client import request_bytes, run_streams
from inferserve.config.demo import demo_model
from inferserve.config.model_source import locate

ONE_STREAM_AT_LEAST = 0.9
EIGHT_STREAMS_AT_LEAST = 3.0
STREAMS = 8
TEXT = "{}. A short story about a lighthouse keeper, {} ships and a storm that lasted for a week:"


def their_model(dtype: torch.dtype) -> Any:
    """transformers' model of the demo GGUF, read by its own code."""
    config = transformers.AutoConfig.from_pretrained(locate("", print).folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tensors = load_gguf_checkpoint(str(demo_model()), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model


def prompt(number: int, stream: int) -> str:
    """A text no other stream of the run has."""
    return TEXT.format(1000 + number, stream + 2)


class Contest:
    """Both sides, each measured by one call; a call returns new tokens a second."""

    def __init__(self, model: Any, server: Server, tokens: int) -> None:
        self._model = model
        self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(locate("", print).folder)
        self._server = server
        self._tokens = tokens
        self._number = 0

    def generate(self) -> float:
        """transformers, one sequence."""
        self._number += 1
        ids = torch.tensor([self._tokenizer.encode(prompt(self._number, 0))])
        began = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids, do_sample=False, max_new_tokens=self._tokens, min_new_tokens=self._tokens, pad_token_id=0
            )
        seconds = time.perf_counter() - began
        assert out.shape[1] == ids.shape[1] + self._tokens
        return self._tokens / seconds

    def streams(self, count: int) -> float:
        """The server, `count` streams that start together; all their tokens over the time of the slowest."""
        self._number += 1
        requests = [self._request(stream) for stream in range(count)]
        done = asyncio.run(run_streams(self._server.port, requests, time.monotonic_ns))
        for stream in done:
            texts = [payload for _, payload in stream.events() if payload != "[DONE]"]
            assert f'"completion_tokens":{self._tokens}' in texts[-1], texts[-1]
        began = min(stream.sent_ns for stream in done)
        ended = max(stream.arrivals[-1].at_ns for stream in done)
        return count * self._tokens / (ended - began) * 1e9

    def _request(self, stream: int) -> bytes:
        body = {
            "model": "demo",
            "prompt": prompt(self._number, stream),
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return request_bytes("/v1/completions", body)


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        "median": round(statistics.median(values), 2),
        "lowest": round(min(values), 2),
        "highest": round(max(values), 2),
    }


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Of the medians, and the spread of the rounds' own ratios."""
    by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {**spread(by_round), "of_medians": round(statistics.median(ours) / statistics.median(theirs), 2)}


def main() -> None:
    """Measure, print, write JSON; exit status 1 if a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a request")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", default="benchmarks/results/cpu_speed.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    model = their_model(getattr(torch, args.dtype))
    flags = ("--data-type", args.dtype, "--cpu-threads", str(args.threads), "--served-model-name", "demo")
    with Server("--device", "cpu", "--max-req-total-len", "2048", *flags) as server:
        contest = Contest(model, server, args.tokens)
        sides: dict[str, Callable[[], float]] = {
            "transformers": contest.generate,
            "one_stream": lambda: contest.streams(1),
            "eight_streams": lambda: contest.streams(STREAMS),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(args.rounds + 1):
            for name, side in sides.items():
                rate = side()
                if round_:  # the first is for caches and page faults
                    rates[name].append(rate)
        started = round(server.start_seconds, 2)
    one, eight = (ratio(rates[name], rates["transformers"]) for name in ("one_stream", "eight_streams"))
    result = {
        "threads": args.threads,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "server_start_s": started,
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "one_stream_vs_transformers": {**one, "at_least": ONE_STREAM_AT_LEAST},
        "eight_streams_vs_transformers": {**eight, "at_least": EIGHT_STREAMS_AT_LEAST},
    }
    write_result(args.out, result)
    for name, value in result.items():
        print(f"{name}: {value}")
    raise SystemExit(one["of_medians"] < ONE_STREAM_AT_LEAST or eight["of_medians"] < EIGHT_STREAMS_AT_LEAST)


if __name__ == "__main__":
    main()
