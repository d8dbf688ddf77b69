"""Are the logits right? Teacher-forced, against transformers in float32, in every way a step can run.

    python -m benchmarks.logits [--shape llama-3.1-8b] [--deterministic] [--out FILE]

One sequence of random tokens runs through the engine's own steps: in one chunk, and its last tokens one by one, alone and
among other rows; launched piece by piece and, on a GPU, as replays of CUDA graphs. Logits are compared with transformers'
float32 model of the same random weights. The error may be --limit times that of transformers' own model in the served
dtype, and where the float32 model's best two tokens lie further apart than 0.15 of the logits' standard deviation, all
must choose the same. With --deterministic all ways must agree to the bit. About 60 s on an H200; exit status 1 if wrong.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import schema
from inferserve.config.cli import parse
from inferserve.config.resolve import resolve
from inferserve.config.schema import ServerConfig
from inferserve.engine.runner import Runner
from inferserve.engine.step import StepBatch
from inferserve.engine.torch_backend import TorchBackend
from inferserve.models.decoder import Decoder
from inferserve.models.dummy_weights import RandomTensors
from inferserve.models.registry import family_of, read_model_config
from inferserve.models.sharding import NO_CUTS
from inferserve.models.weights import destinations

_SHAPES = Path(__file__).parent / "shapes"
_CLEAR_GAP = 0.15
_LONGEST = 512
_SEED = 11

Launch = Callable[[StepBatch], torch.Tensor]
"""A step → logits [S, vocab]."""


@dataclass(frozen=True)
class Part:
    """What a row does in a step: tokens [start, stop) of its text; logits of the last `wanted` of them."""

    row: int
    start: int
    stop: int
    wanted: int


class Texts:
    """Random tokens for every row, the first of which is watched; row r's KV lies at [r * longest, (r + 1) * longest)."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.ids = np.random.default_rng(_SEED).integers(0, vocab, (rows, _LONGEST), dtype=np.int32)
        self._places = np.arange(rows * _LONGEST, dtype=np.int32).reshape(rows, _LONGEST)

    def step(self, parts: Sequence[Part]) -> StepBatch:
        """Decode rows (one token) first, then chunks, as the engine has them."""
        counts = np.array([part.stop - part.start for part in parts], np.int32)
        wanted = np.array([part.wanted for part in parts])
        positions = np.concatenate([np.arange(part.start, part.stop) for part in parts]).astype(np.int32)
        owners = np.repeat([part.row for part in parts], counts)
        sample = np.repeat(np.arange(len(parts)), wanted).astype(np.int32)
        return StepBatch(
            step=0,
            rows=np.array([part.row for part in parts], np.int32),
            num_decode=int((counts == 1).sum()),
            query_len=counts,
            kv_len=np.array([part.stop for part in parts], np.int32),
            token_ids=self.ids[owners, positions],
            positions=positions,
            kv_index=self._places[owners, positions],
            table=self._places,
            new_prefix=(),
            sample=sample,
            out_position=np.zeros(len(sample), np.int32),
        )


@torch.inference_mode()
def in_one_chunk(launch: Launch, texts: Texts, length: int, tail: int) -> torch.Tensor:
    """Logits [tail, vocab] of the watched row's last tokens, read at once."""
    return launch(texts.step([Part(0, 0, length, tail)])).float()


@torch.inference_mode()
def one_by_one(launch: Launch, texts: Texts, length: int, tail: int, others: int, chunk: int) -> torch.Tensor:
    """The same, each token in a step of its own beside `others` rows of ragged lengths and, if `chunk`, a prompt."""
    ragged = [1 + row * (_LONGEST - 2 * tail) // max(1, others) for row in range(others)]
    for row, size in enumerate(ragged, start=1):
        launch(texts.step([Part(row, 0, size, 1)]))
    launch(texts.step([Part(0, 0, length - tail, 1)]))
    found = []
    for done in range(tail):
        at = length - tail + done
        parts = [Part(0, at, at + 1, 1)]
        parts += [Part(row, size + done, size + done + 1, 1) for row, size in enumerate(ragged, start=1)]
        parts += [Part(others + 1, done * 2, done * 2 + chunk, 0)] if chunk else []
        found.append(launch(texts.step(parts))[0].float().clone())
    return torch.stack(found)


def launches(runner: Runner) -> dict[str, Launch]:
    """The ways to run a step. A graph's logits are copied: its memory is used again."""

    def replayed(batch: StepBatch) -> torch.Tensor:
        assert runner.graphs is not None
        done = runner.graphs.launch(batch)
        if done is None:
            raise LookupError(f"no graph serves a step of {len(batch.token_ids)} tokens")
        return done[0].clone()

    ways: dict[str, Launch] = {"eager": lambda batch: runner._forward(batch)[0]}
    return {**ways, "graph": replayed} if runner.graphs else ways


def all_ways(runner: Runner, texts: Texts, length: int, tail: int, rows: int) -> dict[str, torch.Tensor]:
    """Logits [tail, vocab] by way; a way that no graph serves is left out."""
    found: dict[str, torch.Tensor] = {}
    for name, launch in launches(runner).items():
        one = partial(one_by_one, launch, texts, length, tail)
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "chunk": partial(in_one_chunk, launch, texts, length, tail),
            "alone": partial(one, 0, 0),
            f"among {rows - 1}": partial(one, rows - 1, 0),
            "beside a chunk": partial(one, 3, 64),
        }
        for kind, run in kinds.items():
            try:
                found[f"{name}, {kind}"] = run().cpu()
            except LookupError as error:
                print(f"{name}, {kind}: {error}", flush=True)
    return found


@torch.inference_mode()
def reference(config: ServerConfig, ids: np.ndarray, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tail, vocab] of transformers' model with our random weights: in float32, and in the served dtype."""
    device, dtype = torch.device(config.engine.device), getattr(torch, config.model.data_type)
    folder = Path(config.facts.folder)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
    ours = read_model_config(folder)
    family = family_of(ours, "native")
    assert family is not None
    with torch.device("meta"):
        slots = destinations(Decoder(family.spec(ours)), family.names, ours.num_layers)
    shapes = {name: slot.shape for name, slot in slots.items()}
    if ours.tie_word_embeddings:
        del shapes["lm_head.weight"]
    theirs = {name.removeprefix("model."): value for name, value in model.named_parameters()}
    for name, tensor in RandomTensors(shapes, dtype, device).read(NO_CUTS):
        theirs.pop(name).copy_(tensor)
    assert not theirs, f"not drawn: {sorted(theirs)}"
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(device)
    exact = model(input_ids=tokens, use_cache=False).logits[0, -tail:].float().cpu()
    rounded = model.to(dtype)(input_ids=tokens, use_cache=False).logits[0, -tail:].float().cpu()
    return exact, rounded


def compare(exact: torch.Tensor, rounded: torch.Tensor, found: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Relative errors, and how many clear choices differ, by way; bits that differ from the first way's."""
    best = exact.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > _CLEAR_GAP * exact.std(-1)
    choice, first = best.indices[:, 0], next(iter(found.values()))
    their_error = float((rounded - exact).norm() / exact.norm())
    ways = {}
    for name, logits in found.items():
        error = float((logits - exact).norm() / exact.norm())
        ways[name] = {
            "error": round(error, 6),
            "over_transformers": round(error / their_error, 4) if their_error > 1e-6 else 0.0,
            "clear_choices_that_differ": int((logits.argmax(-1) != choice)[clear].sum()),
            "equals_first_to_the_bit": bool(torch.equal(logits, first)),
        }
    return {"transformers_error": round(their_error, 6), "clear": int(clear.sum()), "of": len(clear), "ways": ways}


def problems(figures: dict[str, Any], limit: float, deterministic: bool) -> list[str]:
    """What is wrong, a line each."""
    said = []
    for name, way in figures["ways"].items():
        if not way["error"] < 1.0 or way["over_transformers"] > limit:
            said.append(f"{name}: error {way['error']:g}, {way['over_transformers']:g} x transformers'")
        if way["clear_choices_that_differ"]:
            said.append(f"{name}: {way['clear_choices_that_differ']} of {figures['clear']} clear choices differ")
        if deterministic and not way["equals_first_to_the_bit"]:
            said.append(f"{name}: not equal to the bit")
    return said


def main() -> None:
    """Run, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name in benchmarks/shapes, or a folder")
    parser.add_argument("--flags", default="", help='further server flags: --flags="--a --b"')
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--length", type=int, default=256, help="tokens of the watched text")
    parser.add_argument("--tail", type=int, default=48, help="of them compared")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--limit", type=float, default=1.15, help="error over that of transformers' own model")
    parser.add_argument("--out", default="", metavar="FILE")
    args = parser.parse_args()
    folder = Path(args.shape) if Path(args.shape).is_dir() else _SHAPES / args.shape
    flags = (
        f"--model-dir {folder} --load-format dummy --max-req-total-len {_LONGEST} --running-max-req-size {args.rows}"
    )
    flags += f" --max-total-token-num {args.rows * _LONGEST} {args.flags}" + " --deterministic" * args.deterministic
    config = resolve(parse(shlex.split(flags)).settings)
    texts = Texts(args.rows, config.facts.vocab_size)
    exact, rounded = reference(config, texts.ids[0, : args.length], args.tail)
    if config.engine.device == "cuda":
        torch.cuda.empty_cache()
    backend = TorchBackend(config, args.rows)
    backend.start()
    figures = compare(exact, rounded, all_ways(backend._ready(), texts, args.length, args.tail, args.rows))
    figures["problems"] = problems(figures, args.limit, args.deterministic)
    lines = [f"transformers {figures['transformers_error']:g}, {figures['clear']} of {figures['of']} choices are clear"]
    lines += [f"{name}: {way}" for name, way in figures["ways"].items()]
    figures["lines"] = lines + [f"WRONG {line}" for line in figures["problems"]]
    print("\n".join(figures["lines"]), flush=True)
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        schema.write(args.out, schema.result("logits", settings, figures))
    raise SystemExit(bool(figures["problems"]))


if __name__ == "__main__":
    main()
