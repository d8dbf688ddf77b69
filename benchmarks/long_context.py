"""One very long prompt, alone and beside sequences that decode: how fast it is read, and what the others feel of it.

    python -m benchmarks.long_context --url http://127.0.0.1:8000/v1 [--prompt 131000] [--matmul-tflop-s 740]

The prefill rate is the model's floating-point operations (two for each weight and token, and causal attention) over the
time to the first token; --shape says which model that is. The others are clients that decode one long answer each: their
inter-token times while the prompt is read stand beside those before it. The server needs --max-req-total-len to match.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import schema
from benchmarks.load_events import Outcome
from benchmarks.load_report import quantiles
from benchmarks.serve_load import collect, first_model, parser, plan_of
from inferserve.config.dummy_model import weight_count
from inferserve.config.model_config import ModelConfig
from inferserve.config.model_files import read_json

_SHAPES = Path(__file__).parent / "shapes"
_CALM_S = 4.0
"""How long the others decode undisturbed before the prompt comes."""


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Operations of a prompt's forward pass; embedding and head of all but the last token cost nothing."""
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    dense = 2.0 * (weight_count(config) - tables) * tokens
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * tokens**2 / 2
    return dense + attention


def gaps_within(outcomes: list[Outcome], begin_ns: int, end_ns: int) -> list[float]:
    """Milliseconds between tokens of a stream, for those that ended in the window."""
    found: list[float] = []
    for seen in outcomes:
        times = np.asarray(seen.times)
        inside = (times[1:] >= begin_ns) & (times[1:] <= end_ns)
        found += (np.diff(times)[inside] / 1e6).tolist()
    return found


def long_prompt(base: str, model: str, tokens: int) -> Outcome:
    """Send it and wait. Raises RuntimeError if it failed."""
    flags = ["--clients", "1", "--requests", "1", "--input-len", str(tokens), "--output-len", "2"]
    (seen,) = collect(plan_of(parser().parse_args(flags), model), base, timeout_s=300.0).outcomes
    if seen.error:
        raise RuntimeError(f"the long prompt failed: {seen.error}")
    return seen


def beside(base: str, model: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The prompt among clients that decode for `seconds`."""
    flags = ["--clients", str(args.clients), "--duration", str(seconds), "--input-len", "128"]
    plan = plan_of(parser().parse_args([*flags, "--output-len", str(args.output_len)]), model)
    others: list[Outcome] = []
    thread = threading.Thread(target=lambda: others.extend(collect(plan, base).outcomes))
    thread.start()
    time.sleep(_CALM_S + 1.0)
    seen = long_prompt(base, model, args.prompt)
    thread.join()
    failed = [o.error for o in others if o.error]
    if failed:
        raise RuntimeError(f"a decoding client failed: {failed[0]}")
    calm = gaps_within(others, seen.sent_ns - int(_CALM_S / 2 * 1e9), seen.sent_ns)
    during = gaps_within(others, seen.sent_ns, seen.times[0])
    return {"ttft_s": _seconds(seen), "itl_before_ms": quantiles(calm, 3), "itl_during_ms": quantiles(during, 3)}


def _seconds(seen: Outcome) -> float:
    return round((seen.times[0] - seen.sent_ns) / 1e9, 3)


def main() -> None:
    """Measure, print, write."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--url", required=True)
    flags.add_argument("--shape", default="llama-3.1-8b", help="name in benchmarks/shapes, or a folder")
    flags.add_argument("--prompt", type=int, default=131_000, help="tokens")
    flags.add_argument("--clients", type=int, default=32)
    flags.add_argument("--output-len", type=int, default=16_000, help="of the others: longer than the run")
    flags.add_argument("--matmul-tflop-s", type=float, default=0.0, help="measured matrix rate, for the ratios")
    flags.add_argument("--out", default="", metavar="FILE")
    args = flags.parse_args()
    folder = Path(args.shape) if Path(args.shape).is_dir() else _SHAPES / args.shape
    flops = prefill_flops(ModelConfig.from_json(read_json(folder / "config.json")), args.prompt)
    base = args.url.rstrip("/")
    model = first_model(base)
    alone = _seconds(long_prompt(base, model, args.prompt))
    mixed = beside(base, model, args, 2 * _CALM_S + 4 * alone)
    figures: dict[str, Any] = {
        "prompt_tflop": round(flops / 1e12, 1),
        "alone": {"ttft_s": alone, "tflop_s": round(flops / alone / 1e12, 1)},
        "beside": {**mixed, "tflop_s": round(flops / mixed["ttft_s"] / 1e12, 1)},
    }
    before, during = mixed["itl_before_ms"].get("p99"), mixed["itl_during_ms"].get("p99")
    ratios = {"itl_p99_during_over_before": round(during / before, 3)} if before and during else {}
    for name in ("alone", "beside"):
        if args.matmul_tflop_s:
            ratios[f"{name}_over_matmul_rate"] = round(figures[name]["tflop_s"] / args.matmul_tflop_s, 3)
    figures["lines"] = [
        f"alone {alone} s, {figures['alone']['tflop_s']} TFLOP/s; beside {args.clients}: {mixed['ttft_s']} s,"
        f" {figures['beside']['tflop_s']} TFLOP/s; inter-token p99 {before} ms before, {during} ms during"
    ]
    print(*figures["lines"], ratios, sep="\n", flush=True)
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name not in ("out", "url")}
        schema.write(args.out, schema.result("long_context", settings, figures, ratios))


if __name__ == "__main__":
    main()
