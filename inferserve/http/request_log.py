"""The log line of a finished request, with LightLLM's field names."""

from __future__ import annotations

import logging
import time

from inferserve.http.generation import Generation
from inferserve.log import event

log = logging.getLogger(__name__)


class RequestLog:
    """Writes one INFO line a request that ran.

    Args:
        enabled: False with --disable-log-requests.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def finished(self, generation: Generation, reason: str, first_token_ns: int, now_ns: int) -> None:
        """Log the end.

        Args:
            reason: stop, length, abort or error.
            first_token_ns, now_ns: CLOCK_MONOTONIC when its first text item arrived (0: none did), and now.
        """
        if not self._enabled or not log.isEnabledFor(logging.INFO):
            return
        request, usage = generation.request, generation.usage
        total_ns = now_ns - request.arrival_ns
        tokens = usage.completion_tokens
        # Over the sequences of a request the mean is that of its clock time, as the client sees it.
        decode_ms = (now_ns - first_token_ns) / 1e6 / (tokens - 1) if tokens > 1 else 0.0
        fields: dict[str, object] = {
            "X-Request-Id": request.request_id,
            "X-Session-Id": request.session_id or "-",
            "start_time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - total_ns / 1e9)),
            "req_id": request.name,
            "first_token_cost": f"{(first_token_ns - request.arrival_ns) / 1e6:.1f}ms" if first_token_ns else "-",
            "total_cost_time": f"{total_ns / 1e6:.1f}ms",
            "out_token_counter": tokens,
            "mean_per_token_cost_time": f"{decode_ms:.2f}ms",
            "prompt_token_num": usage.prompt_tokens,
            "gpu_cache_hit": usage.cached_tokens > 0,
            "gpu_prompt_cache_len": usage.cached_tokens,
            "gpu_prompt_cache_ratio": usage.cached_tokens / max(1, usage.prompt_tokens),
            "finish_reason": reason,
        }
        if generation.failed is not None:
            fields["error"] = generation.failed.message
        event(log, "request finished", **fields)
