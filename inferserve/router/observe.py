"""`Observer`: turns what the router sees into metrics and the status line. Decides nothing."""

from __future__ import annotations

from typing import Protocol

from inferserve.config.schema import ServerConfig
from inferserve.protocol.messages import EngineReady, StepReport
from inferserve.router.status import Standing, StatusLine


class Metrics(Protocol):
    """What is used of `metrics.client.MetricsClient`."""

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        """Raise a counter."""

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram."""

    def due_in(self, now: float) -> float:
        """Seconds until `flush` has something to send."""

    def flush(self, now: float, force: bool = False) -> None:
        """Push totals if they are due."""


class Observer:
    """Metrics and status of one router; times are `time.monotonic()`."""

    def __init__(self, config: ServerConfig, metrics: Metrics, now: float) -> None:
        self._config = config
        self._metrics = metrics
        self._status = StatusLine(config.log.log_stats_interval, not config.log.disable_log_stats, now)

    def due_in(self, now: float) -> float:
        """Seconds until `flush` has something to do."""
        return min(self._metrics.due_in(now), self._status.due_in(now))

    def engine_ready(self, engine: EngineReady) -> None:
        """The pool's size is known."""
        model, part = self._config.model, self._config.engine
        labels = (model.data_type, f"{part.mem_fraction:g}", str(not part.disable_dynamic_prompt_cache).lower())
        self._metrics.set("cache_config_info", 1, "1", str(engine.kv_tokens), *labels)

    def step(self, report: StepReport, now: float) -> None:
        """The engine reported a step."""
        tokens = report.prefill_tokens + report.decode_tokens
        if tokens:
            method = "prefill" if report.prefill_tokens else "decode"
            self._metrics.observe("iteration_tokens", tokens)
            self._metrics.add("batch_inference_count", 1, method)
            self._metrics.observe("batch_inference_duration", report.step_seconds, method)
        if report.preempted:
            self._metrics.add("num_preemptions", report.preempted)
        if report.drafts:
            self._drafts(report)
        self._status.step(report.prefill_tokens, len(report.slots) // 4 + sum(report.accepted), now)

    def _drafts(self, report: StepReport) -> None:
        self._metrics.add("spec_decode_num_drafts", report.drafts)
        self._metrics.add("spec_decode_num_draft_tokens", report.draft_tokens)
        self._metrics.add("spec_decode_num_accepted_tokens", sum(report.accepted))
        for position, count in enumerate(report.accepted):
            self._metrics.add("spec_decode_num_accepted_tokens_per_pos", count, str(position))

    def first_token(self, prompt_len: int, cached_tokens: int) -> None:
        """A row started; `cached_tokens` of its prompt came from the prefix cache."""
        self._metrics.add("prefix_cache_queries", prompt_len)
        self._metrics.add("prefix_cache_hits", cached_tokens)
        self._status.prefix(prompt_len, cached_tokens)

    def stand(self, standing: Standing, now: float) -> None:
        """How things stand after a wake-up."""
        put = self._metrics.set
        put("num_requests_running", standing.running)
        put("num_running_reqs", standing.running)
        put("num_requests_waiting", standing.waiting)
        put("queue_size", standing.waiting)
        put("batch_current_size", standing.running + standing.paused)
        put("batch_pause_size", standing.paused)
        put("kv_cache_usage_perc", standing.kv_usage)
        if standing.busy:
            self._status.wake(now)
        rates = self._status.end_interval(now, standing)
        if rates:
            put("cache_hit_rate", rates.prefix_hit)
            put("gen_throughput", rates.generation)

    def push_due(self, now: float) -> bool:
        """Whether metrics would be pushed now: the moment for figures that cost something."""
        return self._metrics.due_in(now) <= 0

    def push(self, peak_tokens: int, now: float) -> None:
        """Push metrics, with the estimated peak KV use of the rows that run."""
        self._metrics.set("batch_current_max_tokens", peak_tokens)
        self._metrics.flush(now)
