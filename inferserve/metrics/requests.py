"""What one request adds to the metrics, for the http process: a call at its begin, at each token event, at its end.

    meter = RequestMetrics(client).begin(arrival_ns, now_ns, prompt_tokens=…, n=…, max_tokens=…)
    meter.first_token(now_ns, cached_tokens)    # at the first token event of the request, before `tokens`
    meter.tokens(sequence, count, now_ns)       # at each token event, the first included
    meter.finish("stop", now_ns, start_ns=…)    # once it ended for whatever reason; a second call does nothing

A request that never gets as far as `begin` is counted by `RequestMetrics.refused`. All times are CLOCK_MONOTONIC
nanoseconds. Knows nothing of slots and HTTP.
"""

from __future__ import annotations

from inferserve.metrics.client import MetricsClient

_NS = 1e-9


def _seconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) * _NS


class RequestMetrics:
    """The request metrics of one http worker."""

    def __init__(self, client: MetricsClient) -> None:
        self.client = client

    def refused(self, reason: str) -> None:
        """Count a request that was refused before `begin`; `reason` is one of `names.FAILURE_REASONS`."""
        self.client.add("request_count")
        self.client.add("request_failure", 1.0, reason)

    def begin(self, arrival_ns: int, now_ns: int, *, prompt_tokens: int, n: int, max_tokens: int) -> RequestMeter:
        """Count a request that is valid and tokenised and goes to the router next."""
        self.client.add("request_count")
        self.client.observe("request_validation_duration", _seconds(arrival_ns, now_ns))
        return RequestMeter(self.client, arrival_ns, prompt_tokens, n, max_tokens)


class RequestMeter:
    """One request under way."""

    __slots__ = (
        "_arrival_ns",
        "_cached_tokens",
        "_client",
        "_generated",
        "_last_ns",
        "_max_tokens",
        "_open",
        "_prompt_tokens",
        "_started",
    )

    def __init__(self, client: MetricsClient, arrival_ns: int, prompt_tokens: int, n: int, max_tokens: int) -> None:
        self._client = client
        self._arrival_ns = arrival_ns
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._last_ns = [0] * n
        self._generated = [0] * n
        self._cached_tokens = 0
        self._started = False
        self._open = True

    def first_token(self, now_ns: int, cached_tokens: int) -> None:
        """The first token event of any sequence is here; `cached_tokens` prompt tokens were in the prefix cache."""
        if self._started:
            return
        client, prompt = self._client, self._prompt_tokens
        self._started = True
        self._cached_tokens = cached = min(cached_tokens, prompt)
        wait = _seconds(self._arrival_ns, now_ns)
        client.observe("time_to_first_token_seconds", wait)
        client.observe("request_first_token_duration", wait)
        client.add("prompt_tokens", prompt)
        client.add("prompt_tokens_cached", cached)
        client.add("prompt_tokens_by_source", cached, "local_cache_hit")
        client.add("prompt_tokens_by_source", prompt - cached, "local_compute")
        client.observe("cache_length", cached)
        client.observe("cache_ratio", cached / prompt if prompt else 0.0)
        client.observe("request_prefill_kv_computed_tokens", prompt - cached)

    def tokens(self, sequence: int, count: int, now_ns: int) -> None:
        """`count` new tokens of sequence number `sequence` (0 to n-1) are here."""
        if not count:
            return
        last_ns = self._last_ns[sequence]
        if last_ns:
            self._client.observe("inter_token_latency_seconds", _seconds(last_ns, now_ns))
        self._last_ns[sequence] = now_ns
        self._generated[sequence] += count
        self._client.add("generation_tokens", count)

    def refused(self, reason: str) -> None:
        """It was dropped before it ran, for `reason` (one of `names.FAILURE_REASONS`); nothing for an abort."""
        if self._open:
            self._open = False
            self._client.add("request_failure", 1.0, reason)

    def finish(
        self,
        reason: str,
        now_ns: int,
        *,
        start_ns: int = 0,
        first_token_ns: int = 0,
        last_token_ns: int = 0,
        preemptions: int = 0,
    ) -> None:
        """Count the end.

        Args:
            reason: one of `names.FINISHED_REASONS`; with several sequences the gravest.
            now_ns: now.
            start_ns: when the engine began its prompt, or the router admitted it if none did; 0 if neither.
            first_token_ns, last_token_ns: the engine's first and newest token of all sequences; read only if tokens came.
            preemptions: pauses of all sequences.
        """
        if not self._open:
            return
        self._open = False
        client = self._client
        client.add("request_success", 1.0, reason)
        if reason == "error":
            client.add("request_failure", 1.0, reason)
        total = _seconds(self._arrival_ns, now_ns)
        client.observe("e2e_request_latency_seconds", total)
        client.observe("request_duration", total)
        if reason != "abort":
            client.observe("request_inference_duration", total)
        client.observe("request_num_preemptions", preemptions)
        self._observe_sizes()
        if start_ns:
            queued = _seconds(self._arrival_ns, start_ns)
            client.observe("request_queue_time_seconds", queued)
            client.observe("request_queue_duration", queued)
        if start_ns and self._started:
            self._observe_phases(start_ns, first_token_ns, last_token_ns)

    def _observe_sizes(self) -> None:
        observe, generated = self._client.observe, sum(self._generated)
        observe("request_prompt_tokens", self._prompt_tokens)
        observe("request_input_length", self._prompt_tokens)
        observe("request_generation_tokens", generated)
        observe("request_generated_tokens", generated)
        observe("request_max_num_generation_tokens", max(self._generated))
        observe("request_params_n", len(self._generated))
        observe("request_params_max_tokens", self._max_tokens)
        observe("request_max_new_tokens", self._max_tokens)

    def _observe_phases(self, start_ns: int, first_token_ns: int, last_token_ns: int) -> None:
        observe, longest = self._client.observe, max(self._generated)
        decode = _seconds(first_token_ns, last_token_ns)
        observe("request_prefill_time_seconds", _seconds(start_ns, first_token_ns))
        observe("request_decode_time_seconds", decode)
        observe("request_inference_time_seconds", _seconds(start_ns, last_token_ns))
        if longest > 1:
            observe("request_time_per_output_token_seconds", decode / (longest - 1))
            observe("request_mean_time_per_token_duration", decode / (longest - 1))
