"""Which step target serves best: the real planner over a pretended H200, closed-loop clients, no sockets.

    python -m benchmarks.planner_sim [--out benchmarks/results/planner_sim.json]

Each client sends its next request (fixed lengths) when the last one is answered. A step takes what was measured on an
H200 for Llama-3.1-8B: matrix products by tokens, KV read at the copy rate, attention at 400 TFLOP/s, 0.3 ms on top. The
planner sees it only through a cost model fitted to the steps that calibration times. Also one prompt of 128k tokens
before 16 such clients, and beside 32 sequences that decode; and 256 requests of random lengths at once. Waits at
sockets, the router and the depth of the pipeline are not simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import schema
from inferserve.engine.calibration import made_up_steps
from inferserve.engine.cost_model import StepCost, chunk_pairs, fit, padded
from inferserve.engine.pacing import Pace, Target
from inferserve.engine.planner import Budget, StepPlan, has_room, next_to_start, plan_step
from inferserve.engine.rows import DECODING, FILLING, FREE, QUEUED, EndRules, Rows
from inferserve.engine.warmup import Extent
from inferserve.protocol.sampling import SamplingParams

GEMM_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
GEMM_MS = (4.00, 4.02, 4.17, 4.27, 4.66, 7.12, 11.8, 22.0, 170.0)
"""All matrix products of one step; the last two at 710 to 725 TFLOP/s, the rest as measured in a CUDA graph."""
COPY_BYTES_MS = 4.26e9
KV_BYTES = 131_072
PAIR_FLOPS = 4 * 32 * 128 * 32
ATTENTION_FLOPS_MS = 400e9
OVERHEAD_MS = 0.3
PREFILL_FLOPS_MS = 720e9
TOKEN_FLOPS = 15.0e9
LONG = 131_072


def step_ms(step: StepCost) -> float:
    """What a step takes on the pretended device."""
    tokens = step.tokens if step.tokens <= 64 else padded(step.tokens)
    gemm = float(np.interp(tokens, GEMM_TOKENS, GEMM_MS))
    return (
        gemm
        + step.kv * KV_BYTES / COPY_BYTES_MS
        + step.pairs * PAIR_FLOPS / ATTENTION_FLOPS_MS
        + step.sampled * 0.001
        + OVERHEAD_MS
    )


@dataclass(frozen=True)
class Policy:
    """One way to budget steps: by time, or a fixed number of tokens."""

    name: str
    target: Target | None
    tokens: int = 8448
    chunk: int = 4096

    def pace(self) -> Pace:
        """Fitted to the pretended device."""
        steps = [s.cost for s in made_up_steps(Extent(256, 16384, 8448, 4096), 800_000)]
        model = fit(steps, [step_ms(s) for s in steps]) if self.target else None
        return Pace(Budget(self.tokens, self.chunk), model, self.target)


POLICIES = (
    Policy("no target, 8448 tokens", None),
    Policy("no target, 512 tokens", None, 512, 512),
    Policy("no target, 1024 tokens", None, 1024, 1024),
    Policy("no target, 2048 tokens", None, 2048, 2048),
    *(Policy(f"ratio {ratio:g}", Target(ratio=ratio, share=0)) for ratio in (1.35, 1.8, 2.5)),
    *(
        Policy(f"ratio {ratio:g}, {share:g} prompt tokens a row", Target(ratio=ratio, share=share))
        for ratio, share in ((1.2, 5.0), (1.35, 4.0), (1.35, 5.0), (1.35, 6.0), (1.8, 5.0))
    ),
    *(Policy(f"{ms:g} ms", Target(ms=ms)) for ms in (14.0, 40.0)),
)


@dataclass
class Times:
    """What clients saw, milliseconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Percentiles."""
        return {
            "ttft_p50_ms": round(float(np.percentile(self.first, 50)), 1),
            "ttft_p99_ms": round(float(np.percentile(self.first, 99)), 1),
            "itl_p50_ms": round(float(np.percentile(self.gaps, 50)), 2),
            "itl_p99_ms": round(float(np.percentile(self.gaps, 99)), 2),
        }


class Simulation:
    """Rows of one engine, and the clients behind them: row i is client i."""

    def __init__(self, policy: Policy, clients: int, max_len: int) -> None:
        self.rows, self.rules = Rows(clients, 1), EndRules(clients, 1, ())
        self.length = np.zeros(clients, dtype=np.int32)
        self.now = 0.0
        self.times = Times()
        self.device_prefill_ms = 0.0
        self._sent = np.zeros(clients)
        self._last = np.zeros(clients)
        self._pace = policy.pace()
        self._orders = 0
        self._max_len = max_len

    def send(self, row: int, prompt: int, output: int) -> None:
        """A client sends a request."""
        rows = self.rows
        self._orders += 1
        rows.state[row], rows.order[row], rows.prompt_len[row] = QUEUED, self._orders, prompt
        rows.out_len[row] = rows.planned[row] = self.length[row] = 0
        self.rules.set(row, SamplingParams(max_tokens=output), self._max_len)
        self._sent[row] = self.now

    def step(self) -> list[int]:
        """Plan and pretend one step; the rows that are done."""
        rows = self.rows
        budget = self._pace.budget(rows, self.length)
        while (row := next_to_start(rows)) is not None and has_room(rows, self.rules, self.length, budget):
            rows.state[row], rows.fill[row] = FILLING, rows.prompt_len[row]
        plan = plan_step(rows, self.rules, self.length, budget, 2**31)
        cost = self._cost(plan)
        self.now += step_ms(cost)
        self._pace.observe(cost, step_ms(cost))
        return self._advance(plan)

    def _cost(self, plan: StepPlan) -> StepCost:
        before = self.length[plan.prefill].tolist()
        pairs = sum(chunk_pairs(b, c) for b, c in zip(before, plan.chunks.tolist(), strict=True))
        kv = int(self.length[plan.decode].sum()) + len(plan.decode)
        return StepCost(len(plan.decode) + int(plan.chunks.sum()), kv, pairs, len(plan.decode) + len(plan.prefill))

    def _advance(self, plan: StepPlan) -> list[int]:
        rows = self.rows
        self.length[plan.decode] += 1
        self.length[plan.prefill] += plan.chunks
        complete = plan.prefill[self.length[plan.prefill] == rows.fill[plan.prefill]]
        rows.state[complete] = DECODING
        self.times.first += (self.now - self._sent[complete]).tolist()
        self.times.gaps += (self.now - self._last[plan.decode]).tolist()
        got = np.concatenate((plan.decode, complete))
        self._last[got] = self.now
        rows.out_len[got] += 1
        rows.planned[got] = rows.out_len[got]
        done = got[rows.out_len[got] >= self.rules.limit[got]]
        rows.state[done] = FREE
        return done.tolist()


def closed_loop(policy: Policy, clients: int, waves: int, prompt: int, output: int, long: int = 0) -> dict[str, float]:
    """`clients` × `waves` requests of fixed lengths, all clients starting at once, behind one prompt of `long` tokens."""
    simulation = Simulation(policy, clients + 1, long + prompt + output)
    left = clients * (waves - 1)
    if long:
        simulation.send(clients, long, 1)
    for client in range(clients):
        simulation.send(client, prompt, output)
    while (simulation.rows.state != FREE).any():
        for client in simulation.step():
            if left and client < clients:
                left -= 1
                simulation.send(client, prompt, output)
    rate = clients * waves * output / simulation.now * 1e3
    return {"output_tok_s": round(rate), **simulation.times.summary()}


def offline(policy: Policy, requests: int) -> dict[str, float]:
    """All at once, 100 to 1024 tokens in and out at random."""
    random = np.random.default_rng(0)
    lengths = random.integers(100, 1025, (requests, 2))
    simulation = Simulation(policy, requests, int(lengths.sum(axis=1).max()))
    for row, (prompt, output) in enumerate(lengths.tolist()):
        simulation.send(row, prompt, output)
    while (simulation.rows.state != FREE).any():
        simulation.step()
    return {"output_tok_s": round(int(lengths[:, 1].sum()) / simulation.now * 1e3), **simulation.times.summary()}


def long_prompt(policy: Policy, decodes: int, prompt: int) -> dict[str, float]:
    """One long prompt beside sequences that decode at a context of 1k."""
    simulation = Simulation(policy, decodes + 1, 2 * prompt)
    for row in range(decodes):
        simulation.send(row, 1024, prompt)
    while (simulation.rows.state[:decodes] != DECODING).any():
        simulation.step()
    simulation.times = Times()
    simulation.send(decodes, prompt, 1)
    slowdowns = []
    while simulation.rows.state[decodes] != FREE:
        alone = step_ms(StepCost(decodes, int(simulation.length[:decodes].sum()) + decodes, 0.0, decodes))
        began = simulation.now
        simulation.step()
        slowdowns.append((simulation.now - began) / alone)
    flops = prompt * TOKEN_FLOPS + chunk_pairs(0, prompt) * PAIR_FLOPS
    seconds = simulation.times.first[-1] / 1e3
    return {
        "decodes_itl_p99_ratio": round(float(np.percentile(slowdowns, 99)), 2),
        "prefill_s": round(seconds, 1),
        "prefill_share_of_rate": round(flops / PREFILL_FLOPS_MS / 1e3 / seconds, 3),
    }


def main() -> None:
    """Every policy under every load, and a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waves", type=int, default=6, help="requests of each client")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = []
    for policy in POLICIES:
        for clients in (16, 64, 256):
            figures = closed_loop(policy, clients, args.waves, 1024, 256)
            runs.append({"policy": policy.name, "clients": clients, **figures})
            print(json.dumps(runs[-1]), file=sys.stderr)
        runs.append({"policy": policy.name, "offline": 256, **offline(policy, 256)})
        print(json.dumps(runs[-1]), file=sys.stderr)
        figures = closed_loop(policy, 16, args.waves, 1024, 256, long=LONG)
        runs.append({"policy": policy.name, "clients": 16, "behind_prompt": LONG, **figures})
        print(json.dumps(runs[-1]), file=sys.stderr)
        runs.append({"policy": policy.name, "long_prompt": LONG, **long_prompt(policy, 32, LONG)})
        print(json.dumps(runs[-1]), file=sys.stderr)
    if args.out:
        asked = {"prompt": 1024, "output": 256, "waves": args.waves}
        schema.write(args.out, schema.result("planner_sim", asked, {"runs": runs}))


if __name__ == "__main__":
    main()
