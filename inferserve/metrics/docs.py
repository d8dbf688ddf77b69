"""`python -m inferserve.metrics.docs`: writes docs/metrics.md from the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inferserve.metrics.names import COMMON_LABELS, Kind, Metric, declare

TARGET = Path("docs/metrics.md")

_HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus text format 0.0.4. Every series carries the labels `model_name` (the first served
name) and `engine` (`0`). A *request* is one prompt with its `n` sequences; it counts once in every `request_*` family.

Names are LightLLM's with the prefix `inferserve_`, and vLLM's with vLLM's meaning, so that dashboards, autoscaler rules and
gateways made for either work after changing the prefix. Where both use a name (`request_success`, `prompt_tokens`,
`generation_tokens`) there is one family, with vLLM's meaning. Differences from them:

- `iteration_tokens` is a histogram, so it does not end in `_total` as vLLM's does.
- LightLLM's `request_queue_duration_bucket` and `batch_inference_duration_bucket`, which it declares but never fills, are
  `request_queue_duration` and `batch_inference_duration` and are filled. `batch_next_size`, never filled either, does not
  exist; in place of `request_mtp_avg_token_per_step` there are vLLM's `spec_decode_*`.
- `cache_hit_rate` and `gen_throughput` are averages over the last status interval, not values of the last request.
- Refused requests are in `request_failure` (`invalid`: 4xx, `overloaded`: 429, `unavailable`: 503). A request that an error ended after
  it ran is in `request_failure{reason="error"}` and in `request_success{finished_reason="error"}`. So `request_count` =
  all of `request_success` + `request_failure` without `error` + requests in flight.
- Sums are exact over restarts of every process but the metrics process, after whose restart they continue from what
  the living processes counted. The page can be 0.25 s old, and a process killed by SIGKILL takes as much with it.

Prometheus needs no more than

```yaml
scrape_configs:
  - job_name: inferserve
    static_configs:
      - targets: ["127.0.0.1:8000"]
```

`dashboards/grafana.json` is a Grafana dashboard to import. Autoscalers and the Kubernetes inference gateway want three gauges:
`inferserve_num_requests_waiting`, `inferserve_num_requests_running` and `inferserve_kv_cache_usage_perc` (0 to 1).

This page is written by `python -m inferserve.metrics.docs`.
"""

_TITLES = {
    "http": "Requests (http workers)",
    "router": "Scheduler and KV cache (router)",
    "metrics": "Processes (metrics process)",
}


def _buckets(metric: Metric, other: Metric) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        return ""
    if metric.buckets != other.buckets:
        return "1-2-5 series up to the largest " + ("step" if metric.name == "iteration_tokens" else "request")
    return f"{metric.buckets[0]:g} to {metric.buckets[-1]:g}, {len(metric.buckets)} bounds"


def _labels(metric: Metric) -> str:
    if metric.known != ((),) and metric.known:
        return f"`{metric.labels[0]}`: {', '.join(values[0] for values in metric.known)}"
    return ", ".join(f"`{label}`" for label in metric.labels)


def _lines() -> Iterator[str]:
    # Two sizes of model tell which buckets depend on it.
    small, large = declare(100, 100), declare(100_000, 100_000)
    yield _HEAD
    for role, title in _TITLES.items():
        yield f"## {title}\n"
        yield "| name | type | labels beside " + ", ".join(f"`{c}`" for c in COMMON_LABELS) + " | meaning | buckets |"
        yield "| --- | --- | --- | --- | --- |"
        for name, metric in small.items():
            if metric.role == role:
                buckets = _buckets(metric, large[name])
                yield f"| `{metric.exposed}` | {metric.kind} | {_labels(metric)} | {metric.help} | {buckets} |"
        yield ""


def document() -> str:
    """The text of docs/metrics.md."""
    return "\n".join(_lines()).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
