"""`TorchBackend`: loads a model, sizes its KV pool, and runs steps on one CPU or one GPU."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from inferserve.attention.registry import make_attention
from inferserve.config.machine import available_memory
from inferserve.config.model_config import ModelConfig
from inferserve.config.schema import ServerConfig
from inferserve.engine import memory, warmup
from inferserve.engine.runner import Runner
from inferserve.engine.staging import CpuStaging, CudaStaging
from inferserve.engine.step import BackendFacts, Ints, PendingStep, StepBatch
from inferserve.errors import ConfigError
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.log import event
from inferserve.models.registry import load_model, read_model_config
from inferserve.models.spec import CausalModel
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler

log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_CPU_WARMUP_TOKENS = 16


class TorchBackend:
    """An `EngineBackend` (see `step`)."""

    def __init__(self, config: ServerConfig, max_rows: int) -> None:
        self._config = config
        self._max_rows = max_rows
        self._device = torch.device("cpu")
        self._runner: Runner | None = None

    def start(self) -> BackendFacts:
        """See EngineBackend."""
        config = self._config
        self._device = _device(config)
        if self._device.type == "cpu":
            torch.set_num_threads(config.engine.cpu_threads or torch.get_num_threads())
        model_config = read_model_config(Path(config.facts.folder))
        dtype = dtype_of(config, model_config, self._device)
        model = self._load(dtype)
        try:
            pool = self._make_pool(model, model_config, dtype)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"too little device memory, lower --mem-fraction or --batch-max-tokens: {error}"
            ) from error
        if config.engine.warmup and self._device.type == "cpu":
            self._warm_up(_CPU_WARMUP_TOKENS, 1)
        gib = pool.tokens * KvPool.bytes_per_token(pool.shapes, dtype) / memory.GIB
        about: dict[str, str | int | float] = {
            "device": _device_name(self._device),
            "dtype": str(dtype).removeprefix("torch."),
            "model_type": model_config.model_type,
            "runs_on": type(model).__name__,
            "kv_gib": round(gib, 2),
        }
        return BackendFacts(pool.tokens, about)

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See EngineBackend."""
        self._ready().sampler.open_row(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        """See EngineBackend."""
        self._ready().sampler.close_row(row)

    def launch(self, batch: StepBatch) -> PendingStep:
        """See EngineBackend."""
        return self._ready().launch(batch)

    def _ready(self) -> Runner:
        assert self._runner is not None, "start() first"
        return self._runner

    def _load(self, dtype: torch.dtype) -> CausalModel:
        started = time.monotonic()
        where = "the device" if self._device.type == "cuda" else "the host"
        free = torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else available_memory()
        memory.check_weights(self._config, dtype, free, where)
        try:
            model = load_model(self._config, dtype, self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"too little device memory for the weights: {error}") from error
        event(log, "weights loaded", seconds=round(time.monotonic() - started, 2), runs_on=type(model).__name__)
        return model

    def _make_pool(self, model: CausalModel, model_config: ModelConfig, dtype: torch.dtype) -> KvPool:
        """The pool, and around it the runner."""
        bytes_per_token = KvPool.bytes_per_token(model.kv_shapes, dtype)
        if self._device.type == "cpu":
            tokens = memory.host_tokens(self._config, bytes_per_token, available_memory())
        else:
            tokens = self._measure(model, model_config, dtype, bytes_per_token)
        pool = KvPool(model.kv_shapes, tokens, dtype, self._device)
        self._runner = self._make_runner(model, model_config, pool)
        return pool

    def _measure(self, model: CausalModel, model_config: ModelConfig, dtype: torch.dtype, bytes_per_token: int) -> int:
        """Tokens that --mem-fraction leaves on the device beside weights and the largest step."""
        config = self._config
        largest = config.schedule.batch_max_tokens or config.model.max_req_total_len
        trial = KvPool(model.kv_shapes, largest + 2 * self._max_rows, dtype, self._device)
        self._runner = self._make_runner(model, model_config, trial)
        self._warm_up(min(largest, config.model.max_req_total_len), self._max_rows)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        own = torch.cuda.max_memory_allocated() - trial.tokens * bytes_per_token
        self._runner = None
        del trial
        torch.cuda.empty_cache()
        return memory.device_tokens(config, bytes_per_token, int(total * config.engine.mem_fraction) - others - own)

    def _make_runner(self, model: CausalModel, model_config: ModelConfig, pool: KvPool) -> Runner:
        config, device = self._config, self._device
        name = config.engine.attention_backend
        if name == "auto":
            name = "triton" if device.type == "cuda" else "reference"
        max_len = config.model.max_req_total_len
        return Runner(
            model=model,
            attention=make_attention(name, pool, device),
            kernels=kernels_for(device),
            sampler=Sampler(self._max_rows, max_len, model_config.vocab_size, device, config.model.eos_id),
            staging=CpuStaging(self._max_rows)
            if device.type == "cpu"
            else CudaStaging(self._max_rows, max_len, device),
        )

    def _warm_up(self, tokens: int, rows: int) -> None:
        """One prefill of `tokens`, then a decode step of `rows` rows with a sampling filter."""
        started = time.monotonic()
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1)
        table = np.zeros((self._max_rows, self._config.model.max_req_total_len), np.int32)
        prompt = np.full(1, warmup.TOKEN, np.int32)
        for row in range(rows):
            self.open_row(row, params, prompt, prompt[:0])
        self.launch(warmup.prefill(table, tokens)).result()
        self.launch(warmup.decode(table, rows, min(tokens, table.shape[1]))).result()
        for row in range(rows):
            self.close_row(row)
        event(log, "warmed up", tokens=tokens, rows=rows, seconds=round(time.monotonic() - started, 2))


def _device(config: ServerConfig) -> torch.device:
    wanted = config.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def dtype_of(config: ServerConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """The flag's dtype; by default the model's own on CUDA (bfloat16 if it does not say), float32 on the CPU."""
    asked = config.model.data_type
    if asked != "auto":
        return _DTYPES[asked]
    return _DTYPES[model_config.dtype or "bfloat16"] if device.type == "cuda" else torch.float32
