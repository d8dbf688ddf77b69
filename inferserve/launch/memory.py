"""Is there memory for what is about to start? Asked before any process starts, answered with the numbers.

An engine that meets the limit later would be killed in the middle of loading, with nobody to say why.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferserve.config.machine import available_memory, gpu_memory
from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError
from inferserve.shm.layout import columns, element_bytes

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SCALE_BYTES = 4
"""One for each token and head of a KV pool in 8 bits."""
# Resident memory of a process that serves, and what torch adds to the engine's, before any weights.
_PROCESS_BYTES = 90 * 2**20
_TORCH_BYTES = 450 * 2**20


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that the service takes at least. `kv` holds one request of the greatest length."""

    processes: int
    slots: int
    weights: int
    kv: int


def memory_need(config: ServerConfig) -> MemoryNeed:
    """The least memory for a resolved `config`."""
    torch = config.engine.engine == "torch"
    size = _DTYPE_BYTES[config.model.data_type]
    facts, ranks = config.facts, config.parallel.tp
    head = facts.head_dim * size if config.engine.llm_kv_type == "auto" else facts.head_dim + _SCALE_BYTES
    tokens = config.engine.max_total_token_num or config.model.max_req_total_len
    row = sum(element_bytes(c) for c in columns(config.model.max_req_total_len))
    return MemoryNeed(
        processes=_PROCESS_BYTES * (3 + ranks + config.http.httpserver_workers)
        + (_TORCH_BYTES * ranks if torch else 0),
        # Pages appear on touch, and at most this many rows are in use at once, whichever worker's they are.
        slots=row * config.slots_per_worker,
        weights=facts.weights * size,
        kv=2 * facts.num_layers * facts.num_kv_heads * head * tokens if torch else 0,
    )


def check_memory(config: ServerConfig) -> None:
    """Raises ConfigError with needed and available bytes when the service cannot fit."""
    need = memory_need(config)
    model, host = need.weights + need.kv, need.processes + need.slots
    if config.engine.device == "cuda":
        free = gpu_memory()
        problems = [] if free is None else _compare("GPU", model // config.parallel.tp, free[0], config, need)
    else:
        problems, host = [], host + model
    problems += _compare("host", host, available_memory(), config, need)
    if problems:
        raise ConfigError(*problems)


def _compare(where: str, needed: int, available: int, config: ServerConfig, need: MemoryNeed) -> list[str]:
    if needed <= available:
        return []
    kv_flag = "--max-total-token-num" if config.engine.max_total_token_num else "--max-req-total-len"
    return [
        f"too little {where} memory: {_gib(needed)} needed, {_gib(available)} available: weights {_gib(need.weights)},"
        f" KV {_gib(need.kv)} ({kv_flag}), requests {_gib(need.slots)} (--running-max-req-size +"
        f" --max-queued-requests rows of --max-req-total-len), processes {_gib(need.processes)}"
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
