"""`ServerConfig`: every setting, its default and its help, declared once.

A field made with `flag()` is a command-line flag and a key of `--config` files (`max_req_total_len` is
`--max-req-total-len` and `--max_req_total_len`). A default that says "auto" (0, "" or "auto") is replaced by
`resolve()`; what processes receive holds concrete values only. `ModelFacts` are read from the model, not from flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from inferserve.config.quantization import ALIASES, QUANT_TYPES


def flag(default: Any, text: str, *, choices: tuple[str, ...] = (), metavar: str = "", auto: str = "") -> Any:
    """A field that is a flag. `auto` says what the default stands for, shown in --help."""
    return field(default=default, metadata={"help": text, "choices": choices, "metavar": metavar, "auto": auto})


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Model and numerics"""

    model_dir: str = flag("", "Hugging Face folder, .gguf file or hub id", auto="demo model SmolLM2-135M-Instruct")
    served_model_name: str = flag("", "name(s) clients use, comma-separated", auto="last part of --model-dir")
    model_owner: str = flag("inferserve", "owned_by in /v1/models")
    tokenizer_mode: str = flag("auto", "which tokenizer class to load", choices=("auto", "fast", "slow"))
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    load_format: str = flag(
        "auto",
        "weights: the model's files; dummy = random ones, then --model-dir needs only a config.json",
        choices=("auto", "dummy"),
    )
    data_type: str = flag(
        "auto",
        "weights and KV dtype",
        choices=("auto", "float32", "fp32", "float16", "fp16", "bfloat16", "bf16"),
        auto="the model's own; float32 on CPU",
    )
    quant_type: str = flag(
        "none",
        "matrices and their inputs in fp8: a scale a channel, or a 128 x 128 block (b128); quantised checkpoints"
        " need no flag; the vllm- names mean the same",
        choices=("none", *QUANT_TYPES, *ALIASES),
    )
    eos_id: tuple[int, ...] = flag((), "token ids that end a text", metavar="ID", auto="from the model")
    chat_template: str = flag("", "file with a jinja chat template", auto="the tokenizer's")
    max_req_total_len: int = flag(0, "longest prompt plus output, tokens", auto="the model's context, at most 16384")


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """Engine and KV cache"""

    engine: str = flag("torch", "what runs the steps; fake = made-up tokens, for tests", choices=("torch", "fake"))
    device: str = flag("auto", "where it runs", choices=("auto", "cpu", "cuda"))
    model_backend: str = flag(
        "auto",
        "own decoder stack, or transformers' with our paged attention",
        choices=("auto", "native", "transformers"),
    )
    attention_backend: str = flag("auto", "attention implementation", choices=("auto", "triton", "reference"))
    llm_kv_type: str = flag(
        "auto",
        "how K and V are stored: as --data-type says, or in 8 bits with a scale for each token and head",
        choices=("auto", "fp8", "int8"),
        auto="--data-type",
    )
    mem_fraction: float = flag(
        0.9, "share of device memory for weights + KV (of free host memory on CPU: a quarter of it)"
    )
    max_total_token_num: int = flag(0, "KV pool, tokens", auto="what --mem-fraction leaves")
    disable_dynamic_prompt_cache: bool = flag(False, "no prefix cache")
    cpu_threads: int = flag(0, "torch threads on CPU, of each engine process", auto="all cores / --tp")
    warmup: bool = flag(True, "run one step before reporting ready")
    compile_workers: int = flag(
        0,
        "processes that compile kernels while weights load, on a GPU; 1 = none, each is compiled at its first launch",
        auto="half of the cores / --tp, at most 8",
    )
    debug_checks: bool = flag(False, "audit the KV ledger when idle")
    disable_cudagraph: bool = flag(False, "launch every step from Python instead of replaying CUDA graphs")
    graph_max_batch_size: int = flag(
        256, "decode rows of the largest decode graph, at most --running-max-req-size; more rows use the mixed graphs"
    )
    graph_split_batch_size: int = flag(4, "a decode graph for every number of rows up to this")
    graph_grow_step_size: int = flag(8, "beyond that, one for every multiple of this")
    prefill_cudagraph_max_handle_token: int = flag(
        2048,
        "tokens of the largest graph for steps with prompt tokens; larger steps are launched without; 0 = no such graphs",
    )
    deterministic: bool = flag(
        False,
        "the same request gives the same tokens and logprobs whatever runs beside it, at some cost in speed; on one"
        " GPU, with float weights and our own stack, without --spec-mode; the prefix cache keeps no answers, and"
        " --router-token-ratio is 0",
    )
    spec_mode: str = flag(
        "none",
        "guess tokens and check them together; ngram = what followed the same words before. For requests with"
        " temperature 0 and neither penalties, logit_bias nor logprobs; their text stays the same",
        choices=("none", "ngram"),
    )
    spec_tokens: int = flag(0, "tokens guessed at a time", auto="4 with --spec-mode ngram")
    pipeline_depth: int = flag(-1, "steps launched before results are read", auto="1 on CUDA, 0 on CPU")
    fake_step_ms: float = flag(0.0, "--engine fake: milliseconds a step takes")
    fake_period: int = flag(0, "--engine fake: output tokens after which an output repeats itself; 0 = never")
    fake_kv_tokens: int = flag(0, "--engine fake: size of the pretended KV pool", auto="1048576")


@dataclass(frozen=True, kw_only=True)
class ParallelPart:
    """Several GPUs"""

    tp: int = flag(1, "GPUs that hold the model together, each a share of every layer (on CPU: processes)")
    all_reduce: str = flag(
        "nccl",
        "how GPUs add up their shares; symmetric = small sums by reading each other's memory, where they can (new, its"
        " speed is not measured yet)",
        choices=("nccl", "symmetric"),
    )


@dataclass(frozen=True, kw_only=True)
class SchedulePart:
    """Scheduling"""

    running_max_req_size: int = flag(256, "sequences that run at once")
    max_queued_requests: int = flag(1024, "sequences that may wait; beyond it requests get 429")
    batch_max_tokens: int = flag(
        0,
        "tokens of one step, prefill and decode together",
        auto="2 x chunk + 256 on CUDA, chunk + 128 on CPU, room for all rows; at most --max-req-total-len",
    )
    chunked_prefill_size: int = flag(0, "prompt tokens of one sequence in one step", auto="4096 on CUDA, 128 on CPU")
    disable_chunked_prefill: bool = flag(False, "prefill a prompt in one step")
    target_step_ms: float = flag(
        0.0,
        "how long a step with prompts beside decoding sequences should take, milliseconds: their time between tokens",
        auto="--target-step-ratio",
    )
    target_step_ratio: float = flag(
        -1.0,
        "the same, as a multiple of what the step would take without prompts; 5 prompt tokens a running sequence are"
        " always allowed; 0 = no limit but --batch-max-tokens",
        auto="1.35 on CUDA, 0 elsewhere",
    )
    router_token_ratio: float = flag(
        0.85,
        "KV share above which admission reserves every request's full max_tokens; below it, the expected output."
        " 0 = always reserve in full (never pauses), 1 = never",
    )


@dataclass(frozen=True, kw_only=True)
class HttpPart:
    """HTTP service"""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 = any free one")
    httpserver_workers: int = flag(1, "HTTP processes")
    drain_timeout: float = flag(60.0, "seconds that running streams may take after SIGTERM")
    max_body_bytes: int = flag(16 * 2**20, "largest request body")
    max_n: int = flag(16, "largest n of a request")


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """Logs"""

    log_level: str = flag("info", "least severe level shown", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "key=value text or JSON lines", choices=("text", "json"))
    log_stats_interval: float = flag(5.0, "seconds between status lines while busy")
    disable_log_stats: bool = flag(False, "no status line")
    disable_log_requests: bool = flag(False, "no line for each finished request")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Read from the model's files by `resolve()`.

    `folder` holds config.json and the tokenizer (for a .gguf: the conversion cache); `gguf_file` is '' unless weights
    come from one. `vocab_size` is the number of ids the model emits. `weights` counts the numbers in the weight files
    (0 for the fake engine). `generation_defaults` are the sampling fields of generation_config.json that the API falls
    back to.
    """

    folder: str = ""
    gguf_file: str = ""
    model_type: str = ""
    architecture: str = ""
    vocab_size: int = 0
    max_position: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    weights: int = 0
    generation_defaults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All of it, resolved."""

    model: ModelPart = ModelPart()
    engine: EnginePart = EnginePart()
    parallel: ParallelPart = ParallelPart()
    schedule: SchedulePart = SchedulePart()
    http: HttpPart = HttpPart()
    log: LogPart = LogPart()
    facts: ModelFacts = ModelFacts()

    @property
    def slots_per_worker(self) -> int:
        """Rows in one http worker's range: each range is as large as the whole limit."""
        return self.schedule.running_max_req_size + self.schedule.max_queued_requests

    @property
    def slots(self) -> int:
        """Rows of the slot table."""
        return self.slots_per_worker * self.http.httpserver_workers

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; the first is the one reported."""
        return tuple(n.strip() for n in self.model.served_model_name.split(",") if n.strip())


def encode(config: ServerConfig) -> bytes:
    """For `Boot.config`."""
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> ServerConfig:
    """Inverse of `encode`."""
    return msgspec.msgpack.decode(data, type=ServerConfig)
