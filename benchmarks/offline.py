"""Offline throughput: many requests of random lengths, all sent at once; output tokens a second until the last is done.

    python -m benchmarks.offline --url http://127.0.0.1:8000/v1
    python -m benchmarks.offline --serve "--model-dir benchmarks/shapes/llama-3.1-8b --load-format dummy"

256 requests, prompts and outputs of 100 to 1024 tokens, drawn from a seed. Answers are not streamed, since nobody
reads along; everything passes the whole server all the same.
"""

from __future__ import annotations

import sys

from benchmarks import serve_load

REQUESTS = 256
SHORTEST, LONGEST = 100, 1024


def main() -> None:
    """`serve_load` with other defaults; its flags still count."""
    lengths = ["--input-len", str(LONGEST), "--output-len", str(LONGEST), "--spread", str(SHORTEST / LONGEST)]
    load = ["--clients", str(REQUESTS), "--requests", str(REQUESTS), "--no-stream", "--timeout", "600"]
    sys.argv[1:] = ["--workload", "random", *lengths, *load, *sys.argv[1:]]
    serve_load.main("offline", __doc__)


if __name__ == "__main__":
    main()
