"""The stages of `benchmarks.gpu_suite`, as data: servers, loads, limits, and the output tok/s that are wanted."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = "--load-format dummy --max-req-total-len 8192 --disable-log-requests"
"""Flags of every server; a model's own come behind them."""


@dataclass(frozen=True)
class Model:
    """A server: a folder in benchmarks/shapes, further flags, and the seconds that its start may take."""

    shape: str
    flags: str = ""
    start_limit_s: float = 90.0


@dataclass(frozen=True)
class Stage:
    """`module` with `args` against the server of `model` ('' = needs none). `target`: output tok/s that is wanted."""

    name: str
    model: str
    module: str
    args: str
    limit_s: float
    target: float = 0.0


MODELS = {
    "8b": Model("llama-3.1-8b"),
    "8b-fp8": Model("llama-3.1-8b", "--quant-type fp8w8a8 --llm-kv-type fp8"),
    "8b-ordered": Model("llama-3.1-8b", "--deterministic"),
    "8b-guess": Model("llama-3.1-8b", "--spec-mode ngram"),
    "8b-tp2": Model("llama-3.1-8b", "--tp 2"),
    "8b-long": Model(
        "llama-3.1-8b", "--max-req-total-len 131072 --running-max-req-size 64 --max-queued-requests 64"
    ),
    "70b": Model("llama-70b-20-layers"),
    "70b-tp2": Model("llama-70b-20-layers", "--tp 2"),
    "0.6b": Model("qwen3-0.6b", "--httpserver-workers 4", 60.0),
    "0.6b-1w": Model("qwen3-0.6b", "", 60.0),
}  # fmt: skip

_ONE = "--clients 1 --input-len 128 --output-len 512 --warmup 1"
_LONG = "--input-len 1024 --output-len 256 --warmup 4"
_SHORT = "--input-len 512 --output-len 256 --warmup 4"
_TURNS = "--workload multi-turn --clients 64 --turns 8 --prefix-len 2048 --input-len 128 --output-len 128"


def _load(name: str, args: str, limit_s: float, target: float = 0.0) -> Stage:
    """`name` is MODEL-WHAT."""
    return Stage(name, name.rpartition("-")[0], "benchmarks.serve_load", args, limit_s, target)


def _large(model: str, one: float = 0.0, many: float = 0.0, most: float = 0.0) -> tuple[Stage, ...]:
    """One client, 64 and 256."""
    return (
        _load(f"{model}-one", f"{_ONE} --requests 3 --duration 15", 25, one),
        _load(f"{model}-64", f"{_LONG} --clients 64 --requests 256 --duration 24", 40, many),
        _load(f"{model}-256", f"{_LONG} --clients 256 --requests 512 --duration 30", 50, most),
    )


def _small(model: str, one: float, many: float, most: float) -> tuple[Stage, ...]:
    return (
        _load(f"{model}-one", f"{_ONE} --requests 4 --duration 8", 15, one),
        _load(f"{model}-64", f"{_SHORT} --clients 64 --requests 640 --duration 15", 30, many),
        _load(f"{model}-256", f"{_SHORT} --clients 256 --requests 1024 --duration 20", 35, most),
    )


STAGES = (
    Stage("floors", "", "benchmarks.floors", "", 40),
    Stage("startup", "", "benchmarks.startup", "", 180),
    Stage("logits", "", "benchmarks.logits", "", 120),
    Stage("logits-deterministic", "", "benchmarks.logits", "--deterministic", 120),
    *_large("8b", 232, 5400, 6500),
    Stage("8b-offline", "8b", "benchmarks.offline", "", 40, 10300),
    _load("8b-16", f"{_LONG} --clients 16 --requests 96 --duration 20", 30, 2750),
    _load("8b-turns", _TURNS, 60),
    _load("8b-fresh", f"{_TURNS} --only-new", 60),
    _load("8b-bursty", "--workload bursty --rate 12 --burstiness 0.5 --requests 200", 40),
    Stage("8b-long", "8b-long", "benchmarks.long_context", "", 150),
    *_large("8b-fp8"),
    *_large("8b-ordered"),
    *_large("8b-guess"),
    *_large("8b-tp2", 360, 8200),
    *_large("70b"),
    *_large("70b-tp2"),
    *_small("0.6b", 800, 22000, 33000),
    Stage("0.6b-offline", "0.6b", "benchmarks.offline", "", 30, 25500),
    *_small("0.6b-1w", 800, 0, 20000),
)
DEFAULT = "8b-one,8b-64,8b-256,8b-offline,0.6b-one,0.6b-64,0.6b-256"
