"""Products of the four matrices of a Llama-3.1-8B layer on one GPU: fp8 and the few-row kernel against cuBLAS in bf16.

    python -m benchmarks.quant_gpu [--limit 28] [--out FILE.json]

Each case is checked against its torch twin on fresh data, then timed as the replay of a CUDA graph that goes through
copies of the matrix larger together than the caches. The floor is the weights' bytes over the copy rate measured in the
same run. Cases run in the order of their worth until --limit seconds have passed; a case that fails is reported, and the
others go on. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import linear

from benchmarks.schema import Json, require_gpu, result, write
from inferserve.kernels.fp8_matmul import QUANTISED_INSIDE, TILES, Fp8Tiles, fp8_matmul, fp8_matmul_ref
from inferserve.kernels.fp8_quant import GROUP, fp8_quant, fp8_quant_ref
from inferserve.kernels.skinny_matmul import MAX_ROWS, SkinnyConfig, skinny_matmul
from inferserve.layers.linear import Linear
from inferserve.layers.packed import counters
from inferserve.layers.quant import Fp8Scheme

BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
MATRICES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
LAYERS = 32
TOLERANCE = 2e-2
"""Largest ||out - twin|| / ||twin||: roundings to bf16, and the matrix unit's short sums where cuBLAS adds them up."""
_COLD = 400e6
"""Bytes of weights that one replay goes through."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Matrix:
    """Copies of one matrix, float and quantised both ways."""

    outputs: int
    inputs: int
    plain: list[torch.Tensor] = field(default_factory=list)
    channel: list[Linear] = field(default_factory=list)
    block: list[Linear] = field(default_factory=list)

    @staticmethod
    def drawn(outputs: int, inputs: int, quantise: bool = True) -> Matrix:
        """Fresh random numbers."""
        matrix = Matrix(outputs, inputs)
        for _ in range(max(2, round(_COLD / (outputs * inputs)))):
            weight = torch.randn((outputs, inputs), device=DEVICE, dtype=BF16) * inputs**-0.5
            matrix.plain.append(weight)
            for blocks, layers in ((False, matrix.channel), (True, matrix.block)) if quantise else ():
                with DEVICE:
                    layers.append(Linear(inputs, outputs, quant=Fp8Scheme(blocks)))
                layers[-1].slots(0)["weight"].copy_(weight)
                layers[-1].pack()
        return matrix

    def stored(self, blocks: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Values, scales and bias of each copy as kernels take them."""
        weights = [layer.quantised for layer in (self.block if blocks else self.channel)]
        return [(w.values, w.scales if blocks else w.scales.view(-1), w.offset) for w in weights if w is not None]


@dataclass(frozen=True)
class Case:
    """One way of multiplying: for each copy of the matrix a product; the twin of the first; bytes of a weight."""

    name: str
    products: Sequence[Product]
    twin: Product
    itemsize: int


class Bench:
    """Checks and times cases; remembers both."""

    def __init__(self, limit_s: float) -> None:
        self._ends = time.monotonic() + limit_s
        self.rows: list[Json] = []
        self.failed: list[str] = []
        self.skipped = 0
        self.copy_rate = copy_rate()

    def run(self, label: str, case: Case, matrix: Matrix, rows: int) -> float:
        """Microseconds of one product; 0 when it failed or there was no time."""
        if time.monotonic() > self._ends:
            self.skipped += 1
            return 0.0
        name = f"{label} {case.name} M={rows}"
        try:
            x = torch.randn((rows, matrix.inputs), device=DEVICE, dtype=BF16)
            error = relative_error(case.products[0](x), case.twin(x))
            us = graph_time([partial(product, x) for product in case.products])
        except Exception as problem:  # one case of many: the others go on
            self.failed.append(f"{name}: {type(problem).__name__}: {problem}")
            print("FAILED", self.failed[-1][:300], flush=True)
            return 0.0
        if not error <= TOLERANCE:
            self.failed.append(f"{name}: differs from its twin by {error:.1e}")
        floor = matrix.outputs * matrix.inputs * case.itemsize / self.copy_rate * 1e6
        self.rows.append(
            {
                "matrix": label,
                "way": case.name,
                "rows": rows,
                "us": round(us, 2),
                "weights_floor_us": round(floor, 2),
                "share_of_floor": round(floor / us, 3),
                "error": round(error, 5),
            }
        )
        print(f"{name:44} {us:9.2f} us  floor {floor:7.2f}  {floor / us:6.1%}  error {error:.1e}", flush=True)
        return us


def copy_rate() -> float:
    """Bytes a second, read plus written."""
    source = torch.randn(2**28, device=DEVICE, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time([partial(target.copy_, source)]) * 1e6


def relative_error(out: torch.Tensor, twin: torch.Tensor) -> float:
    """NaN where something was not computed."""
    return float((out.float() - twin.float()).norm() / twin.float().norm())


def graph_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of the calls: median of five timings of replays."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (2 * len(calls)))
    return statistics.median(times)


# --------------------------------------------------------------------------------------------------------- the ways


def bf16(matrix: Matrix) -> Case:
    """cuBLAS, the yardstick."""
    weight = matrix.plain[0]
    return Case(
        "bf16 cuBLAS", [partial(linear, weight=w) for w in matrix.plain], lambda x: x.float() @ weight.float().T, 2
    )


def few_rows(matrix: Matrix, config: SkinnyConfig) -> Case:
    """bf16 by the few-row kernel."""
    spare = counters(matrix.plain[0])
    products = [partial(_few, weight=w, spare=spare, config=config) for w in matrix.plain]
    name = f"bf16 few rows {config.block_k}/{config.stages}/{config.programs}"
    return Case(name, products, bf16(matrix).twin, 2)


def _few(x: torch.Tensor, weight: torch.Tensor, spare: torch.Tensor, config: SkinnyConfig) -> torch.Tensor:
    return skinny_matmul(x, weight, None, spare, config)


def served(matrix: Matrix, blocks: bool) -> Case:
    """fp8 as a server multiplies, the quantisation of x included."""
    layers = matrix.block if blocks else matrix.channel
    return Case(f"fp8 {_kind(blocks)}", [layer.forward for layer in layers], _twin(matrix, blocks), 1)


def _kind(blocks: bool) -> str:
    return "block" if blocks else "channel"


def _twin(matrix: Matrix, blocks: bool) -> Product:
    values, scales, bias = matrix.stored(blocks)[0]

    def twin(x: torch.Tensor) -> torch.Tensor:
        q, q_scale = fp8_quant_ref(x, GROUP if blocks or len(x) <= QUANTISED_INSIDE else 0)
        return fp8_matmul_ref(q, q_scale, values, scales, bias, scales, torch.float32)

    return twin


def tiled(matrix: Matrix, blocks: bool, tiles: Fp8Tiles) -> Case:
    """The Triton product under another launch; x is quantised inside, or by a launch before it that is timed too."""
    stored = matrix.stored(blocks)
    spare = counters(stored[0][0])

    def product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if len(x) <= QUANTISED_INSIDE:
            return fp8_matmul(x, None, values, scales, bias, spare, BF16, tiles)
        q, q_scale = fp8_quant(x, GROUP if blocks else 0)
        return fp8_matmul(q, q_scale, values, scales, bias, spare, BF16, tiles)

    name = f"fp8 {_kind(blocks)} {tiles.block_m}x{tiles.block_n}/{tiles.stages}/{tiles.programs}"
    return Case(name, [partial(product, values=v, scales=s, bias=b) for v, s, b in stored], _twin(matrix, blocks), 1)


def library(matrix: Matrix, fast: bool) -> Case:
    """fp8 by cuBLAS, with the matrix unit's short sums (`fast`) or without, the quantisation of x included."""
    stored = matrix.stored(False)

    def product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, q_scale = fp8_quant(x, 0)
        return torch._scaled_mm(q, values.t(), q_scale, scales[None], bias, out_dtype=BF16, use_fast_accum=fast)

    def twin(x: torch.Tensor) -> torch.Tensor:
        values, scales, bias = stored[0]
        return fp8_matmul_ref(*fp8_quant_ref(x, 0), values, scales, bias, scales, torch.float32)

    name = f"fp8 channel cuBLAS{', short sums' if fast else ''}"
    return Case(name, [partial(product, values=v, scales=s, bias=b) for v, s, b in stored], twin, 1)


# -------------------------------------------------------------------------------------------------------- the order


def layers(bench: Bench, matrices: dict[str, Matrix], rows: int) -> Json:
    """All four matrices as served; milliseconds of 32 layers by way."""
    ways: list[Callable[[Matrix], Case]] = [bf16, partial(served, blocks=False), partial(served, blocks=True)]
    if rows <= MAX_ROWS:
        ways.append(partial(few_rows, config=SkinnyConfig(64, 128, 4, 528)))
    total: Json = {}
    for way in ways:
        times = {label: bench.run(label, way(matrix), matrix, rows) for label, matrix in matrices.items()}
        if all(times.values()):
            total[way(matrices["out"]).name] = round(LAYERS * sum(times.values()) / 1e3, 3)
    print(f"32 layers, M={rows}: {total}", flush=True)
    return total


def alternatives(bench: Bench, matrices: dict[str, Matrix]) -> None:
    """The head, which stays bf16, and other launches of the same products, to choose from."""
    head = Matrix.drawn(*HEAD, quantise=False)
    for rows in (1, 8):
        for way in (bf16, partial(few_rows, config=SkinnyConfig(64, 128, 4, 528))):
            bench.run("head", way(head), head, rows)
    for label in ("out", "gate_up", "qkv", "down"):
        matrix = matrices[label]
        for programs in (264, 396, 1056):
            bench.run(label, few_rows(matrix, SkinnyConfig(64, 128, 4, programs)), matrix, 1)
            bench.run(label, tiled(matrix, False, Fp8Tiles(16, 16, 64, True, 4, 4, programs)), matrix, 1)
        bench.run(label, few_rows(matrix, SkinnyConfig(64, 64, 6, 528)), matrix, 1)
        for tiles in (Fp8Tiles(16, 16, 64, True, 4, 6, 528), Fp8Tiles(16, 16, 128, True, 8, 3, 396)):
            bench.run(label, tiled(matrix, False, tiles), matrix, 1)
        bench.run(label, library(matrix, True), matrix, 16)
        bench.run(label, tiled(matrix, False, TILES[2]), matrix, 64)
        for rows in (64, 4096):
            bench.run(label, library(matrix, False), matrix, rows)
    for rows in (256, 4096):
        for label, matrix in matrices.items():
            bench.run(label, tiled(matrix, True, Fp8Tiles(rows, 128, 128, False, 8, 3, 1)), matrix, rows)


def main() -> None:
    """Check, time, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=28.0, help="seconds after which no case is begun")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 4096])
    parser.add_argument("--out", default="benchmarks/results/quant_gpu.json")
    args = parser.parse_args()
    require_gpu()
    torch.set_default_dtype(BF16)  # as when a model is loaded
    with torch.inference_mode():
        bench = Bench(args.limit)
        print(f"copy {bench.copy_rate / 1e12:.2f} TB/s", flush=True)
        matrices = {label: Matrix.drawn(*shape) for label, shape in MATRICES.items()}
        totals = {rows: layers(bench, matrices, rows) for rows in args.rows}
        alternatives(bench, matrices)
    floor = LAYERS * sum(outputs * inputs for outputs, inputs in MATRICES.values()) / bench.copy_rate * 1e3
    figures = {
        "copy_tb_s": round(bench.copy_rate / 1e12, 3),
        "layers_ms": totals,
        "weights_floor_ms": {"fp8": round(floor, 3), "bf16": round(2 * floor, 3)},
        "products": bench.rows,
        "failed": bench.failed,
        "skipped": bench.skipped,
    }
    ratios = {
        f"M={rows}: {way} against bf16 cuBLAS": round(total["bf16 cuBLAS"] / ms, 3)
        for rows, total in totals.items()
        for way, ms in total.items()
        if "bf16 cuBLAS" in total
    }
    write(args.out, result("quant_gpu", {"limit_s": args.limit, "layers": LAYERS}, figures, ratios))
    for rows, total in totals.items():
        print(f"M={rows:<5} 32 layers, ms: {total}")
    print(f"floor of 32 layers: fp8 {floor:.2f} ms, bf16 {2 * floor:.2f} ms; skipped {bench.skipped}")
    print("\n".join(bench.failed) or "all equal their twins")
    raise SystemExit(bool(bench.failed))


if __name__ == "__main__":
    main()
