"""Every metric of the service, once: name without the prefix, kind, help, labels, buckets and the roles that emit it.

Clients, exporter, documentation and the dashboard test read this table. Names are LightLLM's (with our prefix) plus
those of vLLM with vLLM's meaning; where both have a name there is one family with vLLM's meaning. A *request* is one
prompt with its `n` sequences and counts once everywhere. The labels `model_name` and `engine` are added by the
exporter. `_total` is appended to counters when they are shown. Knows nothing of processes and of the config's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from inferserve.protocol.boot import ROLE_HTTP, ROLE_METRICS, ROLE_ROUTER

PREFIX = "inferserve_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMMON_LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")
FAILURE_REASONS = ("invalid", "overloaded", "unavailable", "error")
BATCH_METHODS = ("prefill", "decode")

# TTFT and gaps between tokens start at 1 ms: small models and cached prompts are faster than vLLM's first bounds.
_TTFT = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_PHASE = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_RATIO = tuple(i / 10 for i in range(11))
_N = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Kind(StrEnum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One family.

    Attributes:
        name: without prefix, and for counters without `_total`.
        role: the one kind of process that emits it (ROLE_ names).
        labels: label names that callers give values for, in order.
        known: label values that exist from the start (at zero); `((),)` for a family without labels.
        buckets: upper bounds of a histogram, rising, without +Inf.
    """

    name: str
    kind: Kind
    help: str
    role: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The family name on the metrics page."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … below `limit`, then `limit` itself."""
    series = (m * 10.0**e for e in range(len(str(limit))) for m in (1, 2, 5))
    return (*(bound for bound in series if bound < limit), float(limit))


def _counter(role: str, name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Metric:
    known = tuple((v,) for v in values) if label else ((),)
    return Metric(name, Kind.COUNTER, text, role, (label,) if label else (), known)


def _gauge(role: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, role, labels)


def _histogram(role: str, name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, role, (), ((),), buckets)


def _request_outcomes() -> tuple[Metric, ...]:
    r = ROLE_HTTP
    return (
        _counter(r, "request_count", "Requests that arrived."),
        _counter(r, "request_success", "Requests that ran and ended, by reason.", "finished_reason", FINISHED_REASONS),
        _counter(
            r,
            "request_failure",
            "Requests answered with an error: refused before they ran, or (reason error) ended by one.",
            "reason",
            FAILURE_REASONS,
        ),
        _counter(r, "prompt_tokens", "Prompt tokens of requests that got their first token."),
        _counter(r, "prompt_tokens_cached", "Of these, tokens taken from the prefix cache."),
        _counter(
            r,
            "prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            "source",
            ("local_compute", "local_cache_hit"),
        ),
        _counter(r, "generation_tokens", "Tokens generated."),
    )


def _request_times() -> tuple[Metric, ...]:
    r = ROLE_HTTP
    return (
        _histogram(r, "time_to_first_token_seconds", "Arrival to first token.", _TTFT),
        _histogram(r, "inter_token_latency_seconds", "Gap between two token events of one sequence.", _TOKEN_GAP),
        _histogram(
            r, "request_time_per_output_token_seconds", "Decode time per token after the first, mean.", _TOKEN_GAP
        ),
        _histogram(r, "e2e_request_latency_seconds", "Arrival to end.", _PHASE),
        _histogram(r, "request_queue_time_seconds", "Arrival to the start of its prompt.", _PHASE),
        _histogram(r, "request_prefill_time_seconds", "Admission to first token.", _PHASE),
        _histogram(r, "request_decode_time_seconds", "First to last token.", _PHASE),
        _histogram(r, "request_inference_time_seconds", "Admission to last token.", _PHASE),
        _histogram(r, "request_duration", "Arrival to end, seconds.", _PHASE),
        _histogram(r, "request_validation_duration", "Arrival to a checked and tokenised request, seconds.", _PHASE),
        _histogram(r, "request_queue_duration", "Arrival to the start of its prompt, seconds.", _PHASE),
        _histogram(
            r, "request_inference_duration", "Arrival to end of requests that were not aborted, seconds.", _PHASE
        ),
        _histogram(r, "request_first_token_duration", "Arrival to first token, seconds.", _TTFT),
        _histogram(
            r, "request_mean_time_per_token_duration", "Mean time per token after the first, seconds.", _TOKEN_GAP
        ),
    )


def _request_sizes(lengths: tuple[float, ...]) -> tuple[Metric, ...]:
    r = ROLE_HTTP
    return (
        _histogram(r, "request_prompt_tokens", "Prompt tokens of a request.", lengths),
        _histogram(r, "request_generation_tokens", "Generated tokens of a request, all sequences.", lengths),
        _histogram(r, "request_max_num_generation_tokens", "Tokens of a request's longest sequence.", lengths),
        _histogram(r, "request_prefill_kv_computed_tokens", "Prompt tokens computed, without cached ones.", lengths),
        _histogram(r, "request_params_n", "Requested n.", _N),
        _histogram(r, "request_params_max_tokens", "Output limit of a request.", lengths),
        _histogram(r, "request_num_preemptions", "Times a request was paused for lack of KV.", _PREEMPTIONS),
        _histogram(r, "request_input_length", "Prompt tokens of a request.", lengths),
        _histogram(r, "request_max_new_tokens", "Output limit of a request.", lengths),
        _histogram(r, "request_generated_tokens", "Generated tokens of a request, all sequences.", lengths),
        _histogram(r, "cache_length", "Prompt tokens of a request taken from the prefix cache.", lengths),
        _histogram(r, "cache_ratio", "Share of a request's prompt taken from the prefix cache.", _RATIO),
    )


def _scheduler(step_tokens: tuple[float, ...]) -> tuple[Metric, ...]:
    r = ROLE_ROUTER
    by_method = tuple((m,) for m in BATCH_METHODS)
    return (
        _gauge(r, "num_requests_running", "Sequences that run."),
        _gauge(r, "num_requests_waiting", "Sequences whose prompt has not begun."),
        _gauge(r, "kv_cache_usage_perc", "Share of the KV pool held by running sequences, 0 to 1."),
        _gauge(
            r,
            "cache_config_info",
            "Always 1; the KV pool in labels.",
            *("block_size", "num_gpu_blocks", "cache_dtype", "gpu_memory_utilization", "enable_prefix_caching"),
        ),
        _counter(r, "num_preemptions", "Sequences paused for lack of KV."),
        _counter(r, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        _counter(r, "prefix_cache_hits", "Of these, tokens found."),
        _histogram(r, "iteration_tokens", "Tokens of one engine step, prefill and decode.", step_tokens),
        _gauge(r, "num_running_reqs", "Sequences that run."),
        _gauge(r, "queue_size", "Sequences whose prompt has not begun."),
        _gauge(r, "batch_current_size", "Sequences in the current batch."),
        _gauge(r, "batch_pause_size", "Sequences paused for lack of KV."),
        _gauge(r, "batch_current_max_tokens", "KV tokens the current batch may need at its estimated peak."),
        _gauge(r, "cache_hit_rate", "Share of prompt tokens found in the prefix cache, last few seconds, 0 to 1."),
        _gauge(r, "gen_throughput", "Tokens generated per second, last few seconds."),
        _counter(
            r, "batch_inference_count", "Engine steps; prefill = any prompt token in it.", "method", BATCH_METHODS
        ),
        _counter(r, "spec_decode_num_drafts", "Guesses of next tokens that were checked."),
        _counter(r, "spec_decode_num_draft_tokens", "Tokens guessed."),
        _counter(r, "spec_decode_num_accepted_tokens", "Of these, tokens that were right, as were those before them."),
        _counter(
            r, "spec_decode_num_accepted_tokens_per_pos", "Right tokens by position in their guess.", "position", ()
        ),
        Metric(
            "batch_inference_duration",
            Kind.HISTOGRAM,
            "Time of an engine step, seconds; prefill = any prompt token in it.",
            r,
            ("method",),
            by_method,
            _TOKEN_GAP,
        ),
    )


def _processes() -> tuple[Metric, ...]:
    r = ROLE_METRICS
    return (
        _counter(r, "process_cpu_seconds", "User and system time of the processes of a role.", "role"),
        _gauge(r, "process_resident_memory_bytes", "Resident memory of the processes of a role.", "role"),
        _gauge(r, "processes", "Processes of a role that are alive.", "role"),
    )


def declare(max_req_total_len: int, batch_max_tokens: int) -> dict[str, Metric]:
    """The table by name.

    Args:
        max_req_total_len: longest prompt plus output, tokens; last bound of length histograms.
        batch_max_tokens: most tokens of a step; last bound of `iteration_tokens`.
    """
    metrics = (
        *_request_outcomes(),
        *_request_times(),
        *_request_sizes(one_two_five(max_req_total_len)),
        *_scheduler(one_two_five(batch_max_tokens)),
        *_processes(),
    )
    return {metric.name: metric for metric in metrics}
