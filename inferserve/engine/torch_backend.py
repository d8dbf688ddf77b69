"""`TorchBackend`: loads a model, sizes its KV pool, and runs steps on one CPU or one GPU."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from triton.runtime import driver

from inferserve.attention.base import Bucket, CapturableAttention
from inferserve.attention.registry import make_attention
from inferserve.config.machine import available_memory
from inferserve.config.model_config import ModelConfig
from inferserve.config.schema import ServerConfig
from inferserve.engine import memory, warmup
from inferserve.engine.compile_ahead import Compilers, ModelLaunches
from inferserve.engine.graphs import Parts, buckets, capture, measure
from inferserve.engine.recorder import CudaRecorder
from inferserve.engine.runner import Runner
from inferserve.engine.shared_sampling import shared
from inferserve.engine.staging import CpuStaging, CudaStaging, DeviceRows
from inferserve.engine.step import BackendFacts, Ints, PendingStep, StepBatch
from inferserve.errors import ConfigError
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.log import event
from inferserve.models.decoder import Decoder
from inferserve.models.registry import family_of, load_model, quant_scheme, read_model_config
from inferserve.models.spec import CapturableModel, CausalModel
from inferserve.parallel.ranks import ALONE, Ranks
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampler

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What --llm-kv-type stores K and V as; None = the model's dtype."""


_COMPILE_S = 60.0
"""How long compilers may go on after the weights are there."""


class TorchBackend:
    """An `EngineBackend` (see `step`) for a resolved configuration.

    All that touches tensors runs in inference mode, since what is made there cannot be changed outside. `ranks` hold the
    model together; they load, measure and capture side by side.
    """

    def __init__(self, config: ServerConfig, max_rows: int, ranks: Ranks = ALONE) -> None:
        self._config = config
        self._max_rows = max_rows
        self._ranks = ranks
        self._device = torch.device(config.engine.device)
        self._stored = _STORED[config.engine.llm_kv_type]
        self._runner: Runner | None = None
        self._capturing: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def start(self) -> BackendFacts:
        """See EngineBackend."""
        config = self._config
        if self._device.type == "cpu":
            torch.set_num_threads(config.engine.cpu_threads)
        elif not torch.cuda.is_available():
            raise ConfigError(f"--device cuda: torch {torch.__version__} finds no CUDA device")
        model_config = read_model_config(Path(config.facts.folder))
        dtype = _DTYPES[config.model.data_type]
        compilers = self._compile(model_config, dtype) if self._device.type == "cuda" else None
        model = self._load(dtype)
        if compilers:
            started, done = time.monotonic(), compilers.wait(_COMPILE_S)
            event(log, "kernels compiled", children=done, waited=round(time.monotonic() - started, 2))
        try:
            pool = self._make_pool(model, model_config, dtype)
        except torch.OutOfMemoryError as error:
            held, (free, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
            raise ConfigError(memory.steps_do_not_fit(config, held, free, total)) from error
        if self._device.type == "cuda":
            self._capture(pool)
        elif config.engine.warmup and pool.tokens >= (extent := warmup.small(config, self._max_rows)).places:
            self._warm_up(extent)
        gib = pool.tokens * KvPool.bytes_per_token(pool.shapes, pool.k[0].dtype) / memory.GIB
        about: dict[str, str | int | float] = {
            "device": _device_name(self._device),
            "dtype": str(dtype).removeprefix("torch."),
            "model_type": model_config.model_type,
            "runs_on": type(model).__name__,
            "kv_gib": round(gib, 2),
            "graphs": len(self._ready().graphs or ()),
        }
        return BackendFacts(pool.tokens, about)

    @torch.inference_mode()
    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See EngineBackend."""
        self._ready().sampler.open_row(row, params, prompt, output)

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """See EngineBackend."""
        self._ready().sampler.close_row(row)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> PendingStep:
        """See EngineBackend."""
        return self._ready().launch(batch)

    def _ready(self) -> Runner:
        assert self._runner is not None, "start() first"
        return self._runner

    def _compile(self, model_config: ModelConfig, dtype: torch.dtype) -> Compilers | None:
        """Begin to compile the kernels of our own stack, if there is a child to do it."""
        engine, ranks = self._config.engine, self._ranks
        family = family_of(model_config, engine.model_backend)
        if family is None or engine.compile_workers < 2 or engine.attention_backend != "triton":
            return None
        length, quant = self._config.model.max_req_total_len, quant_scheme(self._config, model_config)
        spec = replace(family.spec(model_config), quant=quant).share(ranks.size)
        launches = ModelLaunches(spec, dtype, self._stored, self._max_rows, length, engine.deterministic)
        first = ranks.rank * engine.compile_workers
        shares = range(first, first + engine.compile_workers)
        target = driver.active.get_current_target()
        return Compilers(launches, target, shares, engine.compile_workers * ranks.size)

    def _load(self, dtype: torch.dtype) -> CausalModel:
        started = time.monotonic()
        where = "the device" if self._device.type == "cuda" else "the host"
        free = torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else available_memory()
        memory.check_weights(self._config, dtype, free, where)
        try:
            model = load_model(self._config, dtype, self._device, self._ranks)
        except torch.OutOfMemoryError as error:
            held, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
            raise ConfigError(memory.weights_do_not_fit(self._config, dtype, held, free)) from error
        event(log, "weights loaded", seconds=round(time.monotonic() - started, 2), runs_on=type(model).__name__)
        return model

    def _make_pool(self, model: CausalModel, model_config: ModelConfig, dtype: torch.dtype) -> KvPool:
        """The pool, and around it the runner."""
        bytes_per_token = KvPool.bytes_per_token(model.kv_shapes, self._stored or dtype)
        if self._device.type == "cpu":
            tokens = memory.host_tokens(self._config, bytes_per_token, available_memory())
        else:
            tokens = self._measure(model, model_config, dtype, bytes_per_token)
        tokens = self._ranks.least(tokens)
        pool = KvPool(model.kv_shapes, tokens, dtype, self._device, self._stored)
        self._runner = self._make_runner(model, model_config, pool)
        return pool

    def _measure(self, model: CausalModel, model_config: ModelConfig, dtype: torch.dtype, bytes_per_token: int) -> int:
        """Tokens that --mem-fraction leaves on the device beside weights and the largest steps.

        What the allocator held at the peak counts, not what was in use: blocks that do not fit each other are part of
        what a step takes.
        """
        extent = warmup.largest(self._config, self._max_rows)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_reserved()
        trial = KvPool(model.kv_shapes, extent.places, dtype, self._device, self._stored)
        self._runner = self._make_runner(model, model_config, trial)
        self._warm_up(extent)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        steps = max(0, torch.cuda.max_memory_reserved() - weights - (trial.tokens + 1) * bytes_per_token)
        parts = self._parts(trial)
        graphs = measure(parts, self._buckets(), self._recorder()) if parts else 0
        self._runner = parts = None
        del trial
        torch.cuda.empty_cache()
        sizes = {"weights": weights, "largest_step": steps, "graphs": graphs, "others": others, "device": total}
        gib = {f"{name}_gib": round(n / memory.GIB, 2) for name, n in sizes.items()}
        event(log, "memory measured", **asdict(extent), **gib)
        budget = int(total * self._config.engine.mem_fraction) - others - weights - steps - graphs
        return memory.device_tokens(self._config, bytes_per_token, budget - bytes_per_token)

    def _buckets(self) -> tuple[Bucket, ...]:
        return buckets(self._config.engine, self._max_rows, warmup.largest(self._config, self._max_rows).tokens)

    def _recorder(self) -> CudaRecorder:
        self._capturing = self._capturing or torch.cuda.Stream(self._device)
        return CudaRecorder(self._capturing)

    def _parts(self, pool: KvPool) -> Parts | None:
        """What graphs are made of; None where steps cannot be captured, or are not to be."""
        runner = self._ready()
        if not self._buckets() or not isinstance(runner.staging, CudaStaging):
            return None
        model, attention = runner.model, runner.lists
        if attention is None or not isinstance(model, CapturableModel) or not model.capturable:
            return None
        return Parts(model, attention, runner.kernels, runner.staging.rows, pool.spare)

    def _capture(self, pool: KvPool) -> None:
        """Give the runner its graphs."""
        parts, wanted = self._parts(pool), self._buckets()
        if parts is None:
            if wanted:
                event(log, "no CUDA graphs: this model or attention backend cannot be captured")
            return
        try:
            graphs = capture(parts, wanted, self._recorder())
            torch.cuda.synchronize()  # what is wrong with a replay shows here, not under load
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info()[0]
            raise ConfigError(memory.graphs_do_not_fit(self._config, pool.tokens, len(wanted), free)) from error
        except RuntimeError as error:
            raise ConfigError(f"CUDA graphs cannot be captured; --disable-cudagraph goes without ({error})") from error
        torch.cuda.empty_cache()  # what the runs before the captures took on their stream
        self._runner = replace(self._ready(), graphs=graphs)

    def _make_runner(self, model: CausalModel, model_config: ModelConfig, pool: KvPool) -> Runner:
        config, device = self._config, self._device
        max_len = config.model.max_req_total_len
        engine = config.engine
        attention = make_attention(
            engine.attention_backend,
            pool,
            device,
            deterministic=engine.deterministic,
            plain=isinstance(model, Decoder) and not any(model_config.windows),
        )
        sampler = Sampler(self._max_rows, max_len, model_config.vocab_size, device, config.model.eos_id)
        return Runner(
            model=model,
            attention=attention,
            kernels=kernels_for(device),
            sampler=shared(sampler, self._ranks),
            staging=CpuStaging(self._max_rows)
            if device.type == "cpu"
            else CudaStaging(DeviceRows.make(self._max_rows, max_len, device)),
            lists=attention if isinstance(attention, CapturableAttention) else None,
        )

    def _warm_up(self, extent: warmup.Extent) -> None:
        """Every kind of step once, up to the sizes of `extent`. On CUDA the first start compiles for some time."""
        started = time.monotonic()
        table = np.zeros((self._max_rows, self._config.model.max_req_total_len), np.int32)
        for phase in warmup.phases(self, table, extent):
            if self._device.type == "cuda":
                event(log, "warming up", phase=phase)
        event(log, "warmed up", seconds=round(time.monotonic() - started, 2))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
