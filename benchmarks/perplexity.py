"""What 8 bits cost: perplexity of SmolLM2 on a text of Debian's documentation, with float and with quantised weights and KV.

    python -m benchmarks.perplexity [--model-dir DIR] [--text FILE ...] [--window 512] [--out FILE.json]

The text is cut into windows; each window's tokens are predicted from those before them in the window, and perplexity is
exp of the mean negative log-likelihood. A window runs through the engine's own step in chunks, so that later chunks read
K and V from the pool as decoding does. Exit status 1 when a change exceeds its limit.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.schema import Json, result, write
from inferserve.attention.registry import make_attention
from inferserve.config.resolve import resolve
from inferserve.config.schema import EnginePart, ModelPart, ServerConfig
from inferserve.engine.staging import CpuStaging
from inferserve.engine.step import StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from inferserve.layers.context import ForwardContext
from inferserve.models.registry import load_model
from inferserve.models.spec import CausalModel

DOC = Path("/usr/share/doc")
TEXTS = (DOC / "dpkg/spec/triggers.txt", DOC / "base-files/FAQ")
"""Of two packages that every Debian system has."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What is quantised, and by how much perplexity may change (share)."""

    name: str
    quant_type: str = "none"
    kv: torch.dtype | None = None
    limit: float = 0.0


CASES = (
    Case("float32"),
    Case("KV fp8", kv=torch.float8_e4m3fn, limit=0.01),
    Case("KV int8", kv=torch.int8, limit=0.01),
    Case("weights fp8w8a8", quant_type="fp8w8a8", limit=0.02),
    Case("weights fp8w8a8-b128", quant_type="fp8w8a8-b128", limit=0.02),
)


class Measure:
    """One model and one kind of pool."""

    def __init__(self, model: CausalModel, kv: torch.dtype | None, window: int) -> None:
        self._model = model
        self._pool = KvPool(model.kv_shapes, window, torch.float32, CPU, kv)
        self._attention = make_attention("reference", self._pool, CPU)
        self._staging = CpuStaging(1)
        self._table = np.arange(window, dtype=np.int32)[None]

    @torch.inference_mode()
    def loss(self, tokens: list[int], chunk: int) -> float:
        """Sum over all tokens but the first of -log p."""
        total = 0.0
        for start in range(0, len(tokens), chunk):
            logits = self._logits(tokens, start, min(start + chunk, len(tokens)))
            targets = torch.tensor(tokens[start + 1 : start + 1 + len(logits)])
            logprobs = logits[: len(targets)].double().log_softmax(-1)
            total -= float(logprobs.gather(1, targets[:, None]).sum())
        return total

    def _logits(self, tokens: list[int], start: int, stop: int) -> torch.Tensor:
        """[stop - start, vocab]."""
        places = np.arange(start, stop, dtype=np.int32)
        batch = StepBatch(
            step=0,
            rows=np.zeros(1, np.int32),
            num_decode=0,
            query_len=np.array([stop - start], np.int32),
            kv_len=np.array([stop], np.int32),
            token_ids=np.array(tokens[start:stop], np.int32),
            positions=places,
            kv_index=places,
            table=self._table,
            new_prefix=(),
            sample=np.zeros(1, np.int32),
            out_position=np.zeros(1, np.int32),
        )
        step = self._staging.put(batch)
        plan = self._attention.plan(step.attention)
        every = torch.arange(stop - start)
        ctx = ForwardContext(step.attention, self._attention, plan, kernels_for(CPU), every)
        return self._model.forward(step.token_ids, ctx)


def configured(model_dir: str, quant_type: str) -> ServerConfig:
    """Resolved, for the CPU in float32."""
    model = ModelPart(model_dir=model_dir, quant_type=quant_type, data_type="float32")
    return resolve(ServerConfig(model=model, engine=EnginePart(device="cpu")))


def read(paths: list[Path]) -> tuple[str, Json]:
    """All texts in one, and what they are."""
    texts = {str(path): path.read_text("utf-8") for path in paths}
    return "\n".join(texts.values()), {
        name: {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        for name, text in texts.items()
    }


def measure(model_dir: str, ids: list[int], window: int, chunk: int) -> dict[str, float]:
    """Perplexity by case."""
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    predicted = sum(len(tokens) - 1 for tokens in windows)
    models: dict[str, CausalModel] = {}
    found: dict[str, float] = {}
    for case in CASES:
        if case.quant_type not in models:
            models = {case.quant_type: load_model(configured(model_dir, case.quant_type), torch.float32, CPU)}
        meter = Measure(models[case.quant_type], case.kv, window)
        found[case.name] = math.exp(sum(meter.loss(tokens, chunk) for tokens in windows) / predicted)
        print(f"{case.name:24} {found[case.name]:.4f}", flush=True)
    return found


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", default="", help="default: the demo model")
    parser.add_argument("--text", type=Path, nargs="+", default=list(TEXTS))
    parser.add_argument("--window", type=int, default=512, help="tokens that are predicted together")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step")
    parser.add_argument("--out", default="benchmarks/results/perplexity.json")
    args = parser.parse_args()
    text, about = read(args.text)
    facts = configured(args.model_dir, "none").facts
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(facts.folder).encode(text)
    found = measure(args.model_dir, ids, args.window, args.chunk)
    change = {case.name: found[case.name] / found[CASES[0].name] - 1 for case in CASES[1:]}
    settings = {
        "model": Path(facts.gguf_file or facts.folder).name,
        "text": about,
        "tokens": len(ids),
        "window": args.window,
        "chunk": args.chunk,
    }
    figures = {"perplexity": found, "limit": {case.name: case.limit for case in CASES[1:]}}
    write(args.out, result("perplexity", settings, figures, {f"{name}: change": v for name, v in change.items()}))
    for case in CASES[1:]:
        print(f"{case.name:24} {100 * change[case.name]:+.3f} %  (limit {100 * case.limit:g} %)")
    raise SystemExit(any(abs(change[case.name]) > case.limit for case in CASES[1:]))


if __name__ == "__main__":
    main()
