"""A small decoder with random weights, runners over it that share nothing, and a random course of steps for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from inferserve.attention.base import Bucket, CapturableAttention
from inferserve.config.model_config import RopeConfig
from inferserve.engine.graphs import Parts, capture
from inferserve.engine.recorder import Recorder
from inferserve.engine.runner import Runner
from inferserve.engine.staging import CpuStaging, CudaStaging, DeviceRows
from inferserve.engine.step import BackendFacts, Ints, PendingStep, StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.models.decoder import Decoder
from inferserve.models.spec import DecoderSpec
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampled, Sampler
from tests.parity.driver import Driver

VOCAB = 97
CPU = torch.device("cpu")
ROWS, LENGTH, TOKENS = 7, 40, 200
BUCKETS = (Bucket(24, 7, 7), Bucket(16, 7, 7), Bucket(7, 7, 0), Bucket(4, 4, 0), Bucket(2, 2, 0), Bucket(1, 1, 0))

MakeAttention = Callable[[KvPool], CapturableAttention]


def random_decoder(
    *,
    max_len: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    windows: tuple[int, ...] = (0, 5),
    qk_norm: bool = True,
    head_dim: int = 16,
    rope: str = "default",
) -> Decoder:
    """Two layers, six query heads on two KV heads; the same weights at every call."""
    spec = DecoderSpec(
        vocab=VOCAB,
        size=64,
        inner=96,
        layers=len(windows),
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=RopeConfig(kind=rope, factor=2.0),
        max_position=max_len,
        windows=windows,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        tied=False,
    )
    generator, before = torch.Generator().manual_seed(3), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Decoder(spec)
    torch.set_default_dtype(before)
    with torch.inference_mode():
        for name, weight in sorted(model.named_parameters()):
            if name != "rotary.freq_factors":
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + float("norm" in name))
        model.prepare(max_len, torch.device(device))
    return model


class KeepingSampler(Sampler):
    """Keeps the logits it was given, and answers with the tokens of `forced` as long as there are any."""

    def __init__(self, device: torch.device, forced: list[torch.Tensor] | None = None) -> None:
        super().__init__(ROWS, LENGTH, VOCAB, device, ())
        self.logits: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self._forced = list(forced or ())

    def sample(self, logits: torch.Tensor, rows: Ints, out_position: Ints) -> Sampled:
        self.logits.append(logits.clone())
        sampled = super().sample(logits, rows, out_position)
        if self._forced:
            sampled = replace(sampled, token_ids=self._forced.pop(0))
        self.tokens.append(sampled.token_ids)
        return sampled


def plain_runner(
    make: MakeAttention,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    forced: list[torch.Tensor] | None = None,
) -> Runner:
    """Steps are launched as they are."""
    model = random_decoder(max_len=LENGTH, device=device, dtype=dtype)
    attention = make(KvPool(model.kv_shapes, TOKENS, dtype, device))
    staging = CpuStaging(ROWS) if device.type == "cpu" else CudaStaging(DeviceRows.make(ROWS, LENGTH, device))
    lists = attention if isinstance(attention, CapturableAttention) else None
    return Runner(model, attention, kernels_for(device), KeepingSampler(device, forced), staging, lists)


def captured_runner(
    make: MakeAttention,
    recorder: Recorder,
    *,
    wanted: tuple[Bucket, ...] = BUCKETS,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    forced: list[torch.Tensor] | None = None,
) -> Runner:
    """Steps that fit a bucket are replayed."""
    model = random_decoder(max_len=LENGTH, device=device, dtype=dtype)
    pool = KvPool(model.kv_shapes, TOKENS, dtype, device)
    attention, rows, kernels = make(pool), DeviceRows.make(ROWS, LENGTH, device), kernels_for(device)
    with torch.inference_mode():
        graphs = capture(Parts(model, attention, kernels, rows, pool.spare), wanted, recorder)
    sampler = KeepingSampler(device, forced)
    return Runner(model, attention, kernels, sampler, CudaStaging(rows), attention, graphs)


@dataclass
class RunnerBackend:
    """A runner as an `EngineBackend`; keeps the steps it was given."""

    runner: Runner
    steps: list[StepBatch] = field(default_factory=list)

    def start(self) -> BackendFacts:
        raise NotImplementedError

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        self.runner.sampler.open_row(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        self.runner.sampler.close_row(row)

    def launch(self, batch: StepBatch) -> PendingStep:
        self.steps.append(replace(batch, table=batch.table.copy()))
        with torch.inference_mode():
            return self.runner.launch(batch)


def generate(
    runner: Runner, seed: int, chunk: int, *, prompts: int = 14, new_tokens: int = 12
) -> tuple[list[tuple[int, ...]], RunnerBackend, Driver]:
    """Texts of some random prompts, with chunks, prefix hits and pauses on the way."""
    backend = RunnerBackend(runner)
    driver = Driver(backend, kv_tokens=TOKENS, max_rows=ROWS, max_len=LENGTH, prefix_cache=True, chunk=chunk)
    texts = driver.generate(random_prompts(prompts, 25, seed), new_tokens, batch=5 + seed % 3, pause_every=9)
    return texts, backend, driver


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to `longest` ids; every third begins like the one before it."""
    random = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        fresh = random.integers(0, VOCAB, int(random.integers(1, longest))).tolist()
        prompts.append((prompts[-1] + fresh)[:longest] if i % 3 == 2 else fresh)
    return prompts
