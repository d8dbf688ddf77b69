"""A small decoder with random weights, and runners over it that share nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from inferserve.config.model_config import RopeConfig
from inferserve.engine.runner import Runner
from inferserve.engine.step import BackendFacts, Ints, PendingStep, StepBatch
from inferserve.models.decoder import Decoder
from inferserve.models.spec import DecoderSpec
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampled, Sampler

VOCAB = 97


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
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        model = Decoder(spec)
        for name, weight in sorted(model.named_parameters()):
            if name != "rotary.freq_factors":
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + float("norm" in name))
        model = model.to(device, dtype)
        model.rotary.freq_factors = torch.nn.Parameter(model.rotary.freq_factors.float(), requires_grad=False)
        model.prepare(max_len, torch.device(device))
    return model


class KeepingSampler(Sampler):
    """Keeps the logits it was given."""

    def __init__(self, max_rows: int, max_len: int, device: torch.device) -> None:
        super().__init__(max_rows, max_len, VOCAB, device, ())
        self.seen: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, rows: Ints, out_position: Ints) -> Sampled:
        self.seen.append(logits.clone())
        return super().sample(logits, rows, out_position)


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
        self.steps.append(batch)
        with torch.inference_mode():
            return self.runner.launch(batch)


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to `longest` ids; every third begins like the one before it."""
    random = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        fresh = random.integers(0, VOCAB, int(random.integers(1, longest))).tolist()
        prompts.append((prompts[-1] + fresh)[:longest] if i % 3 == 2 else fresh)
    return prompts
