"""Cross checks of settings: each returns problems as lines that name the flags. Pure; knows no files and no devices."""

from __future__ import annotations

import math
from typing import NamedTuple

from inferserve.config.model_config import ModelConfig
from inferserve.config.schema import ServerConfig
from inferserve.protocol.sampling import MAX_N


class _Range(NamedTuple):
    """Bounds of one flag, both included unless `open` says that the ends are not."""

    part: str
    name: str
    low: float
    high: float
    open: bool = False


_RANGES = (
    _Range("model", "max_req_total_len", 0, 2**24),
    _Range("engine", "mem_fraction", 0, 1, open=True),
    _Range("engine", "max_total_token_num", 0, 2**40),
    _Range("engine", "cpu_threads", 0, 4096),
    _Range("engine", "compile_workers", 0, 256),
    _Range("engine", "graph_max_batch_size", 1, 65_536),
    _Range("engine", "graph_split_batch_size", 1, 65_536),
    _Range("engine", "graph_grow_step_size", 1, 65_536),
    _Range("engine", "prefill_cudagraph_max_handle_token", 0, 2**24),
    _Range("engine", "pipeline_depth", -1, 1),
    _Range("engine", "spec_tokens", 0, 16),
    _Range("engine", "fake_step_ms", 0, 60_000),
    _Range("engine", "fake_period", 0, 2**24),
    _Range("engine", "fake_kv_tokens", 0, 2**40),
    _Range("parallel", "tp", 1, 64),
    _Range("schedule", "running_max_req_size", 1, 65_536),
    _Range("schedule", "max_queued_requests", 0, 1_000_000),
    _Range("schedule", "batch_max_tokens", 0, 2**24),
    _Range("schedule", "chunked_prefill_size", 0, 2**24),
    _Range("schedule", "target_step_ms", 0, 60_000),
    _Range("schedule", "target_step_ratio", -1, 1000),
    _Range("schedule", "router_token_ratio", 0, 1),
    _Range("http", "port", 0, 65_535),
    _Range("http", "httpserver_workers", 1, 64),
    _Range("http", "drain_timeout", 0, 86_400),
    _Range("http", "max_body_bytes", 1024, 2**40),
    _Range("http", "max_n", 1, MAX_N),
    _Range("log", "log_stats_interval", 0.1, 86_400),
)


def option(name: str) -> str:
    """`max_n` → `--max-n`."""
    return "--" + name.replace("_", "-")


def check_settings(config: ServerConfig) -> list[str]:
    """Problems of what the user set, before anything is known of the model; auto values (0, '') pass."""
    problems = [*_ranges(config), *_model(config), *_engine(config), *_schedule(config), *_speculation(config)]
    schedule = config.schedule
    if schedule.disable_chunked_prefill and schedule.chunked_prefill_size:
        problems.append(f"--chunked-prefill-size {schedule.chunked_prefill_size} contradicts --disable-chunked-prefill")
    return problems


def _ranges(config: ServerConfig) -> list[str]:
    problems = []
    for rule in _RANGES:
        value = getattr(getattr(config, rule.part), rule.name)
        inside = rule.low < value < rule.high if rule.open else rule.low <= value <= rule.high
        if not inside or not math.isfinite(value):
            shown = f"({rule.low:g}, {rule.high:g})" if rule.open else f"[{rule.low:g}, {rule.high:g}]"
            problems.append(f"{option(rule.name)} {value}: must be in {shown}")
    return problems


def _model(config: ServerConfig) -> list[str]:
    problems = [f"--eos-id {i}: must not be negative" for i in config.model.eos_id if i < 0]
    if config.model.max_req_total_len == 1:
        problems.append("--max-req-total-len 1: leaves no room for an output token")
    if config.model.served_model_name and not config.model_names:
        problems.append("--served-model-name: names nothing")
    if not config.http.host:
        problems.append("--host: empty; use 0.0.0.0 for every address")
    return problems


def _engine(config: ServerConfig) -> list[str]:
    engine, problems = config.engine, []
    fake = engine.engine == "fake"
    if fake and engine.device == "cuda":
        problems.append("--engine fake contradicts --device cuda: it computes nothing")
    if not fake:
        problems += [
            f"{option(name)} needs --engine fake"
            for name in ("fake_step_ms", "fake_period", "fake_kv_tokens")
            if getattr(engine, name)
        ]
    if engine.attention_backend == "triton" and engine.device == "cpu":
        problems.append("--attention-backend triton contradicts --device cpu; use reference")
    pool_flag = "fake_kv_tokens" if fake and engine.fake_kv_tokens else "max_total_token_num"
    pool, longest = getattr(engine, pool_flag), config.model.max_req_total_len
    if pool and pool < longest:
        problems.append(
            f"{option(pool_flag)} {pool} is less than --max-req-total-len {longest}: the longest request would never fit"
        )
    return problems


def _speculation(config: ServerConfig) -> list[str]:
    if config.engine.spec_tokens and config.engine.spec_mode == "none":
        return [f"--spec-tokens {config.engine.spec_tokens} needs --spec-mode"]
    return []


def _deterministic(config: ServerConfig) -> list[str]:
    """What makes a row's values depend on its neighbours, once it is known what runs."""
    engine = config.engine
    if not engine.deterministic or engine.engine == "fake":
        return []
    reasons = {
        "--device cpu: matrix products on a CPU depend on the number of rows": engine.device == "cpu",
        "--attention-backend reference: it groups sequences by length": (
            engine.attention_backend == "reference" and engine.device != "cpu"
        ),
        f"--quant-type {config.model.quant_type}: fp8 products depend on the number of rows": (
            config.model.quant_type != "none"
        ),
        f"--tp {config.parallel.tp}: sums over GPUs depend on the number of rows": config.parallel.tp > 1,
        f"--spec-mode {engine.spec_mode}: guessed tokens are computed together": engine.spec_mode != "none",
    }
    return [f"--deterministic contradicts {reason}" for reason, holds in reasons.items() if holds]


def _schedule(config: ServerConfig) -> list[str]:
    schedule, problems = config.schedule, []
    ratio = schedule.target_step_ratio
    if -1 < ratio < 1 and ratio:
        problems.append(f"--target-step-ratio {ratio:g}: must be 0 or at least 1")
    if schedule.target_step_ms and schedule.target_step_ratio > 0:
        problems.append("--target-step-ms contradicts --target-step-ratio")
    batch, chunk, longest = schedule.batch_max_tokens, schedule.chunked_prefill_size, config.model.max_req_total_len
    if schedule.disable_chunked_prefill:
        if batch and batch < longest:
            problems.append(
                f"--batch-max-tokens {batch} is less than --max-req-total-len {longest}"
                " with --disable-chunked-prefill: the longest prompt would never run"
            )
    elif batch and batch < chunk:
        problems.append(f"--batch-max-tokens {batch} is less than --chunked-prefill-size {chunk}")
    return problems


def check_tp(config: ServerConfig, model: ModelConfig) -> list[str]:
    """Why `model` cannot be held by --tp ranks: heads and the MLP are divided, KV heads divided or repeated evenly."""
    tp, kv_heads = config.parallel.tp, model.num_kv_heads
    parts = {"num_attention_heads": model.num_heads, "intermediate_size": model.intermediate_size}
    problems = [f"--tp {tp}: does not divide {name} {size} of config.json" for name, size in parts.items() if size % tp]
    if kv_heads % tp and tp % kv_heads:
        problems.append(
            f"--tp {tp}: neither divides num_key_value_heads {kv_heads} of config.json nor is a multiple of it"
        )
    if config.parallel.all_reduce == "symmetric" and config.engine.device == "cpu":
        problems.append("--all-reduce symmetric contradicts --device cpu: it is for GPUs that read each other's memory")
    return problems


def check_resolved(config: ServerConfig, context: int) -> list[str]:
    """Problems that show once defaults are filled in.

    Args:
        config: with every default concrete.
        context: the model's longest sequence, tokens.
    """
    problems = [*_engine(config), *_schedule(config), *_deterministic(config)]
    if config.model.max_req_total_len > context:
        problems.append(
            f"--max-req-total-len {config.model.max_req_total_len} exceeds the model's context of {context} tokens"
        )
    vocabulary = config.facts.vocab_size
    outside = [i for i in config.model.eos_id if i >= vocabulary]
    return problems + [f"--eos-id {i}: outside the vocabulary of {vocabulary}" for i in outside]
