"""The real server on one GPU: SmolLM2 and a random-weight model of Llama-3.1-8B's shape answer real requests.

Run on a machine with a CUDA GPU: `python -m benchmarks.gpu_server [--gguf FILE] [--out FILE]`. For each model it starts
`inferserve serve`, asks the same greedy question alone and in a crowd, streamed and not, and reads rates over HTTP.
Speed is judged elsewhere; this shows that the whole chain is right on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.schema import require_gpu

Json = dict[str, Any]

_SHAPE = Path(__file__).parent / "shapes" / "llama-3.1-8b"


class Server:
    """`inferserve serve` with its log; the address is in `url` once it serves."""

    def __init__(self, flags: list[str]) -> None:
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inferserve", "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.url = ""
        self.ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            print(line, end="", flush=True)
            found = re.search(r"serving.*(http://[\d.]+:\d+)", line)
            if found:
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def wait(self, seconds: float) -> float:
        """Seconds from start to serving."""
        if not self.ready.wait(seconds) or not self.url:
            raise RuntimeError("".join(self.lines[-30:]))
        return time.monotonic() - self.begin

    def post(self, path: str, body: Json) -> Json:
        """One JSON request."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: Json = json.load(response)
            return answer

    def stream(self, path: str, body: Json) -> list[Json]:
        """Decoded events of a streamed request."""
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            lines = [line.decode().strip() for line in response]
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def exercise(server: Server, prompt: str, max_tokens: int) -> Json:
    """Greedy text alone, streamed, and in a crowd; one-stream and crowd rates over HTTP."""
    body: Json = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    server.post("/v1/completions", body)
    begin = time.monotonic()
    alone = server.post("/v1/completions", body)
    one = max_tokens / (time.monotonic() - begin)
    text = alone["choices"][0]["text"]
    streamed = "".join(e["choices"][0]["text"] for e in server.stream("/v1/completions", body) if e["choices"])
    begin = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        crowd = list(pool.map(lambda i: server.post("/v1/completions", {**body, "prompt": f"{prompt} {i}"}), range(64)))
    rate = 64 * max_tokens / (time.monotonic() - begin)
    sampled = {**body, "temperature": 1.0, "seed": 5, "max_tokens": 32}
    seeds = [server.post("/v1/completions", sampled)["choices"][0]["text"] for _ in range(2)]
    return {
        "text": text[:200],
        "streamed_equals_unstreamed": streamed == text,
        "seed_repeats": seeds[0] == seeds[1],
        "usage": alone["usage"],
        "one_stream_tokens_per_s": round(one, 1),
        "crowd_of_64_tokens_per_s": round(rate, 1),
        "crowd_complete": all(c["usage"]["completion_tokens"] == max_tokens for c in crowd),
    }


def measure(flags: list[str], prompt: str, max_tokens: int) -> Json:
    """Start a server, exercise it, stop it."""
    server = Server(flags)
    try:
        seconds = server.wait(280)
        result = exercise(server, prompt, max_tokens)
    finally:
        status = server.stop()
    return {"flags": flags, "start_seconds": round(seconds, 2), "exit": status, **result}


def main() -> None:
    """Run both models and write one JSON file."""
    import torch
    import transformers
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", default="")
    parser.add_argument("--skip-8b", action="store_true")
    parser.add_argument("--out", default="benchmarks/results/gpu_server.json")
    args = parser.parse_args()
    require_gpu()
    results: Json = {
        "machine": {"gpu": torch.cuda.get_device_name(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(sys.argv),
    }
    if args.gguf:
        flags = ["--model-dir", args.gguf, "--data-type", "bfloat16", "--device", "cuda"]
        results["smollm2"] = measure(flags, "The capital of France is", 64)
    if not args.skip_8b:
        flags = [
            "--model-dir",
            str(_SHAPE),
            "--load-format",
            "dummy",
            "--device",
            "cuda",
            "--max-req-total-len",
            "8192",
        ]
        results["llama_8b_random"] = measure(flags, "The capital of France is", 128)
    Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
