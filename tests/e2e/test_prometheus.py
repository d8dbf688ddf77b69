"""E37: a real Prometheus scrapes the real server and gets exact figures for finished, aborted and refused requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from inferserve.metrics.names import CONTENT_TYPE, Kind, declare
from tests.e2e.requests import CHAT, COMPLETIONS, Body, chunks, post
from tests.e2e.server import RunningServer
from tests.fakes.dashboard import Query, queries
from tests.prometheus import Prometheus, needs_prometheus, promtool

FINISHED, ABORTED, REFUSED = 10, 5, 3
TABLE = declare(16384, 8448)
PROMPT = "Once upon a time there was a server that counted everything it did, and"


@dataclass
class Usage:
    """What clients were told."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 0
    failures: list[int] = field(default_factory=list)

    def add(self, usage: Body) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]


def finish_ten(server: RunningServer, told: Usage) -> None:
    """Half streamed, half not; chat and completions; one with three choices; four that overlap in the prefix cache."""
    for i in range(FINISHED):
        path = CHAT if i % 3 == 0 else COMPLETIONS
        prompt: Body = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
        body: Body = {**prompt, "max_tokens": 5 + i, "ignore_eos": True, "n": 3 if i == 4 else 1}
        if i % 2:
            answer = chunks(server, path, {**body, "stream_options": {"include_usage": True}})[-1]
        else:
            answer = post(server, path, body).json()
        told.add(answer["usage"])
        told.choices += body["n"]


def abort_five(server: RunningServer) -> None:
    """Clients that read one event and go."""

    def leave() -> None:
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            next(line for line in response.iter_lines() if line.startswith("data: "))

    threads = [threading.Thread(target=leave) for _ in range(ABORTED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def refuse_three(server: RunningServer, told: Usage) -> None:
    """A wrong value, a prompt that is too long, no JSON."""
    told.failures.append(post(server, COMPLETIONS, {"prompt": "x", "temperature": -1}).status_code)
    told.failures.append(post(server, COMPLETIONS, {"prompt": [17] * 20_000, "max_tokens": 1}).status_code)
    with server.client() as client:
        told.failures.append(client.post(CHAT, content=b"{", headers={"Content-Type": "application/json"}).status_code)


@dataclass
class Scene:
    """Server and Prometheus after all that traffic, and what clients were told."""

    server: RunningServer
    prometheus: Prometheus
    told: Usage


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    flags = ("--engine", "fake", "--fake-step-ms", "2", "--httpserver-workers", "2", "--log-stats-interval", "1")
    with (
        RunningServer(*flags) as server,
        Prometheus(server.url.removeprefix("http://"), tmp_path_factory.mktemp("prometheus")) as prometheus,
    ):
        told = Usage()
        finish_ten(server, told)
        prometheus.wait_for('sum(inferserve_request_success_total{finished_reason=~"stop|length"})', FINISHED)
        prometheus.wait_for("inferserve_generation_tokens_total", told.completion_tokens)
        abort_five(server)
        refuse_three(server, told)
        server.wait_until_idle(5)
        prometheus.wait_for("inferserve_request_count_total", FINISHED + ABORTED + REFUSED)
        prometheus.wait_for('inferserve_request_success_total{finished_reason="abort"}', ABORTED)
        prometheus.wait_for("sum(inferserve_request_failure_total)", REFUSED)
        yield Scene(server, prometheus, told)


@needs_prometheus
def test_outcomes(scene: Scene) -> None:
    ask = scene.prometheus.query
    assert scene.told.failures == [400, 400, 400]
    assert ask("inferserve_request_success_total") == {
        ("length",): FINISHED,
        ("abort",): ABORTED,
        ("stop",): 0,
        ("error",): 0,
    }
    assert ask("inferserve_request_failure_total > 0") == {("invalid",): REFUSED}


@needs_prometheus
def test_token_totals_are_the_sum_of_usage(scene: Scene) -> None:
    value = scene.prometheus.value
    prompt = value("inferserve_prompt_tokens_total")
    assert prompt is not None and prompt > scene.told.prompt_tokens  # aborted ones had prompts too
    assert value("inferserve_generation_tokens_total") == value("inferserve_request_generation_tokens_sum")
    assert prompt == value("inferserve_request_prompt_tokens_sum")
    assert prompt == value("sum(inferserve_prompt_tokens_by_source_total)")
    assert value("inferserve_prompt_tokens_cached_total") == value("inferserve_cache_length_sum")
    assert value("inferserve_prompt_tokens_cached_total") == value(
        'inferserve_prompt_tokens_by_source_total{source="local_cache_hit"}'
    )


@needs_prometheus
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("e2e_request_latency_seconds", FINISHED + ABORTED),
        ("time_to_first_token_seconds", FINISHED + ABORTED),
        ("request_queue_time_seconds", FINISHED + ABORTED),
        ("request_prefill_time_seconds", FINISHED + ABORTED),
        ("request_decode_time_seconds", FINISHED + ABORTED),
        ("request_prompt_tokens", FINISHED + ABORTED),
        ("request_generation_tokens", FINISHED + ABORTED),
        ("request_params_max_tokens", FINISHED + ABORTED),
        ("request_params_n", FINISHED + ABORTED),
        ("request_inference_duration", FINISHED),
    ],
)
def test_histogram_counts_agree(scene: Scene, family: str, count: int) -> None:
    value = scene.prometheus.value
    assert value(f"inferserve_{family}_count") == count
    assert value(f'inferserve_{family}_bucket{{le="+Inf"}}') == count


@needs_prometheus
def test_choices_and_steps(scene: Scene) -> None:
    value = scene.prometheus.value
    assert value("inferserve_request_params_n_sum") == scene.told.choices + ABORTED
    steps = value("sum(inferserve_batch_inference_count_total)")
    assert steps == value("inferserve_iteration_tokens_count")
    assert steps == value("sum(inferserve_batch_inference_duration_count)")


@needs_prometheus
def test_no_stale_gauge(scene: Scene) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "queue_size"):
        assert scene.prometheus.value(f"inferserve_{name}") == 0


@needs_prometheus
def test_every_declared_metric_is_emitted_by_its_role(scene: Scene) -> None:
    stored = set(scene.prometheus.api("label/__name__/values"))
    for metric in TABLE.values():
        if metric.name.startswith("spec_decode_"):
            continue  # nothing is guessed without --spec-mode; test_drafts counts
        series = metric.exposed + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        assert series in stored, metric.name
        # Nothing of this traffic makes the KV pool too small.
        if metric.kind is not Kind.GAUGE and metric.name != "num_preemptions":
            assert scene.prometheus.value(f"sum({series})"), metric.name


def test_preemptions_are_counted() -> None:
    """Short texts teach the router to expect short ones; then long ones come and do not fit together."""
    flags = ("--engine", "fake", "--fake-kv-tokens", "600", "--router-token-ratio", "1")
    with RunningServer(*flags, "--max-req-total-len", "512", "--disable-dynamic-prompt-cache") as server:
        post(server, COMPLETIONS, {"prompt": [PROMPT] * 64, "max_tokens": 300, "stop": list("aeio")})
        server.wait_until_idle(5)
        # Among these, the engine may pause one whose text has ended already, of which its client does not hear.
        before = {name: server.metric(name) for name in ("num_preemptions_total", "request_num_preemptions_sum")}
        bodies = [{"prompt": PROMPT, "max_tokens": 300, "seed": i} for i in range(8)]
        threads = [threading.Thread(target=post, args=(server, COMPLETIONS, body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_until_idle(5)
        paused, told = (server.metric(name) - earlier for name, earlier in before.items())
        assert paused == told > 0
        assert server.metric("batch_pause_size") == 0


@needs_prometheus
def test_page_is_what_prometheus_3_accepts(scene: Scene) -> None:
    answer = httpx.get(scene.server.url + "/metrics", headers={"Accept": "application/openmetrics-text,*/*;q=0.1"})
    assert answer.headers["content-type"] == CONTENT_TYPE
    done = promtool("check", "metrics", text=answer.text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_prometheus
@pytest.mark.parametrize("query", queries(), ids=lambda q: f"{q.panel}: {q.legend}")
def test_every_query_of_the_dashboard_has_an_answer(scene: Scene, query: Query) -> None:
    found = scene.prometheus.query(query.filled("5m"))
    assert any(math.isfinite(value) for value in found.values())


@needs_prometheus
@pytest.mark.parametrize("role", ["http", "metrics"])
def test_totals_survive_a_restart(role: str) -> None:
    """Of an http worker nothing counted is lost; after the exporter's death the living push all they counted again."""
    with RunningServer("--engine", "fake") as server:
        body = {"prompt": PROMPT, "max_tokens": 7, "ignore_eos": True}
        for _ in range(3):
            assert post(server, COMPLETIONS, body).json()["usage"]["completion_tokens"] == 7
        assert server.metric("generation_tokens_total") == 21
        dead = server.children()[role]
        dead.kill()
        dead.wait(5)
        _wait_for_metric(server, "generation_tokens_total", 21.0)
        assert post(server, COMPLETIONS, body).status_code == 200
        _wait_for_metric(server, "generation_tokens_total", 28.0)
        server.wait_until_idle(2)


def _wait_for_metric(server: RunningServer, name: str, wanted: float, seconds: float = 10.0) -> None:
    found: float | None = None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            found = server.metric(name)
        except httpx.HTTPError:
            found = None
        if found == wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} is {found}, not {wanted}")
