"""How many tokens the KV pool gets. Arithmetic over free memory, with errors that carry the numbers and the flags."""

from __future__ import annotations

import torch

from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError

GIB = 2**30
_TOKENS_PER_SEQUENCE = 2048
"""On CPU the pool need not hold more than this for every sequence that may run: untouched pages cost nothing, but
mapped ones hide from other programs."""
_HOST_SHARE = 0.25
_INT32 = 2**31 - 1


def check_weights(config: ServerConfig, dtype: torch.dtype, free: int, where: str) -> None:
    """Raise ConfigError if the weights alone cannot fit into `free` bytes."""
    size, kept = _weights(config, dtype)
    shared = f" on each of --tp {config.parallel.tp}" if config.parallel.tp > 1 else ""
    if size > free:
        raise ConfigError(
            f"too little memory: {config.facts.weights} weights take {size / GIB:.1f} GiB{shared} as {kept},"
            f" {where} has {free / GIB:.1f} GiB free"
        )


def _weights(config: ServerConfig, dtype: torch.dtype) -> tuple[int, str]:
    """Bytes of a rank's weights, at least, and as what they are kept."""
    quantised = config.model.quant_type != "none" and config.engine.device == "cuda"
    size = config.facts.weights * (1 if quantised else dtype.itemsize) // config.parallel.tp
    name = str(dtype).removeprefix("torch.")
    return size, f"{config.model.quant_type} (--quant-type)" if quantised else f"{name} (--data-type)"


def host_tokens(config: ServerConfig, bytes_per_token: int, free: int) -> int:
    """Size of a pool in host memory, tokens. `free` is what is left after loading, bytes, for all ranks."""
    free //= config.parallel.tp
    longest = config.model.max_req_total_len
    budget = int(free * config.engine.mem_fraction * _HOST_SHARE)
    useful = max(config.schedule.running_max_req_size * _TOKENS_PER_SEQUENCE, 4 * longest)
    asked = config.engine.max_total_token_num
    return checked(config, asked or min(budget // bytes_per_token, useful), bytes_per_token, free if asked else budget)


def device_tokens(config: ServerConfig, bytes_per_token: int, budget: int) -> int:
    """Size of a pool in device memory, tokens. `budget` is --mem-fraction less weights and activations, bytes."""
    tokens = config.engine.max_total_token_num or max(budget, 0) // bytes_per_token
    return checked(config, tokens, bytes_per_token, budget)


def checked(config: ServerConfig, tokens: int, bytes_per_token: int, budget: int) -> int:
    """`tokens`, at most 2^31 - 1. Raises ConfigError if they do not fit, or cannot hold one request."""
    tokens = min(tokens, _INT32)
    if tokens * bytes_per_token > max(budget, 0):
        raise ConfigError(
            f"too little memory: --max-total-token-num {tokens} takes {tokens * bytes_per_token / GIB:.2f} GiB"
            f" ({bytes_per_token} bytes a token), {max(budget, 0) / GIB:.2f} GiB are there (--mem-fraction"
            f" {config.engine.mem_fraction:g})"
        )
    if tokens < config.model.max_req_total_len:
        raise ConfigError(
            f"the KV pool holds {tokens} tokens, --max-req-total-len is {config.model.max_req_total_len}:"
            " lower it, or raise --max-total-token-num or --mem-fraction"
            f" ({bytes_per_token} bytes a token, {max(budget, 0) / GIB:.2f} GiB for the pool)"
        )
    return tokens


def graphs_do_not_fit(config: ServerConfig, tokens: int, graphs: int, free: int) -> str:
    """What to say when `graphs` CUDA graphs find too little room, `free` bytes, beside a pool of `tokens`."""
    engine = config.engine
    return (
        f"too little device memory for {graphs} CUDA graphs beside a KV pool of {tokens} tokens"
        f" ({free / GIB:.2f} GiB left): lower --mem-fraction {engine.mem_fraction:g},"
        f" --graph-max-batch-size {engine.graph_max_batch_size} or"
        f" --prefill-cudagraph-max-handle-token {engine.prefill_cudagraph_max_handle_token}, or use --disable-cudagraph"
    )


def weights_do_not_fit(config: ServerConfig, dtype: torch.dtype, held: int, free: int) -> str:
    """What to say when loading ran out of device memory. `held`: what this process has, bytes; `free`: what is left."""
    size, kept = _weights(config, dtype)
    return (
        f"too little device memory for the weights: {size / GIB:.1f} GiB as {kept}, this process holds"
        f" {held / GIB:.1f} GiB and {free / GIB:.1f} GiB are free"
    )


def steps_do_not_fit(config: ServerConfig, held: int, free: int, total: int) -> str:
    """What to say when the largest steps or the pool ran out of device memory; bytes as in `weights_do_not_fit`."""
    schedule, share = config.schedule, config.engine.mem_fraction
    return (
        f"too little device memory for the largest steps and the KV pool: this process holds {held / GIB:.1f} GiB,"
        f" {free / GIB:.1f} of the device's {total / GIB:.1f} GiB are free. Lower --mem-fraction {share:g} (the pool),"
        f" --batch-max-tokens {schedule.batch_max_tokens}, --running-max-req-size {schedule.running_max_req_size} or"
        f" --max-req-total-len {config.model.max_req_total_len} (the steps)"
    )
