"""`inferserve serve --tp 2` on a CPU: the same text as transformers under every kind of load, ranks in step, a clean end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
import zmq

from inferserve.config.made_tokenizer import made_tokenizer
from inferserve.protocol.messages import Commands, EngineMessage
from inferserve.transport.channel import Outbox
from tests.e2e.requests import COMPLETIONS, post
from tests.e2e.server import RunningServer
from tests.pace import slowness
from tests.parity.tiny import greedy, spread

VOCAB = 301
"""Not a multiple of two: the last rank's part is padded."""
EOS = 300
TOKENS = 24


@dataclass(frozen=True)
class Truth:
    """A model folder, and transformers' answers."""

    folder: Path
    model: Any

    def text(self, prompt: list[int], tokens: int = TOKENS) -> str:
        """What greedy decoding says after `prompt`; every id is a text of its own."""
        vocab = {i: token for token, i in made_tokenizer(VOCAB)["model"]["vocab"].items()}
        ids = greedy(self.model, tuple(prompt), tokens)
        end = ids.index(EOS) if EOS in ids else None
        return "".join(vocab[i] for i in ids[:end]).replace("Ġ", " ")


def make(folder: Path, **settings: Any) -> Truth:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS}
    config = transformers.LlamaConfig(**(sizes | heads | ids | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spread(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(made_tokenizer(VOCAB)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Truth(folder, model)


def serve(truth: Truth, run_dir: Path, *flags: str) -> RunningServer:
    fixed = ("--model-dir", str(truth.folder), "--device", "cpu", "--cpu-threads", "1", "--tp", "2", "--debug-checks")
    return RunningServer(*fixed, *flags, timeout_s=120, env={"INFERSERVE_RUN_DIR": str(run_dir)})


def prompts(count: int) -> list[list[int]]:
    """Of 5 to 60 tokens; every second one continues the one before. (transformers takes id 0 for padding.)"""
    random = np.random.default_rng(5)
    made: list[list[int]] = []
    for i in range(count):
        fresh = random.integers(3, VOCAB, int(random.integers(5, 40))).tolist()
        made.append((made[-1] + fresh)[:60] if i % 2 else fresh)
    return made


def ask(server: RunningServer, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}
    answer = post(server, COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def leave(server: RunningServer, prompt: list[int]) -> None:
    """Begin a stream and go."""
    body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "stream": True}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        next(response.iter_lines())


def engines(server: RunningServer) -> dict[str, psutil.Process]:
    """By name, from the status file."""
    (status,) = Path(server.env["INFERSERVE_RUN_DIR"]).glob("boot-*/status.json")
    named = json.loads(status.read_text())["processes"]
    return {name: psutil.Process(entry["pid"]) for name, entry in named.items() if name.startswith("engine")}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return make(tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="module")
def server(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A pool for two or three sequences, an admission that lets many more in, and guessed tokens."""
    pool = ("--max-total-token-num", "200", "--max-req-total-len", "180", "--router-token-ratio", "1")
    steps = ("--chunked-prefill-size", "16", "--batch-max-tokens", "40")
    with serve(truth, tmp_path_factory.mktemp("r"), *pool, *steps, "--spec-mode", "ngram") as running:
        yield running


def test_mixed_load_under_kv_pressure(truth: Truth, server: RunningServer) -> None:
    """Chunks, prefix hits, pauses, siblings, stop strings and closed streams together; debug checks compare every turn."""
    # Short texts first, which teach the router to expect such, and to admit more than fits.
    short = {"prompt": [[7, 8, 9]] * 48, "max_tokens": TOKENS, "stop": ["a", "e", "i", "o"]}
    assert post(server, COMPLETIONS, short).status_code == 200
    asked = prompts(8)
    texts = [truth.text(prompt) for prompt in asked]
    work: list[Callable[[], Any]] = [lambda p=p: ask(server, p) for p in asked]
    stops = [text[len(text) // 2 :][:5] for text in texts]
    work += [lambda p=p, s=s: ask(server, p, stop=s) for p, s in zip(asked, stops, strict=True)]
    long = [truth.text(prompt[:4], 80) for prompt in asked]
    work += [lambda p=p: ask(server, p[:4], max_tokens=80) for p in asked]
    work += [lambda p=p: leave(server, p) for p in asked]
    work += [lambda p=p: ask(server, p, n=3, temperature=1.0, seed=4) for p in asked[:2]]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = [future.result() for future in [pool.submit(each) for each in work]]
    for prompt, text, stop, whole, cut in zip(asked, texts, stops, answers, answers[8:16], strict=False):
        assert whole["text"] == text, prompt
        assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    assert [answer["text"] for answer in answers[16:24]] == long
    server.wait_until_idle(10)
    assert server.metric("num_preemptions_total") > 0
    assert server.metric("prefix_cache_hits_total") > 0


def test_logprobs_are_those_of_the_whole_model(truth: Truth, server: RunningServer) -> None:
    prompt = prompts(1)[0]
    found = ask(server, prompt, max_tokens=1, logprobs=3)["logprobs"]
    with torch.inference_mode():
        wanted = truth.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(3).values
    assert found["token_logprobs"][0] == pytest.approx(wanted[0].item(), abs=1e-4)
    assert sorted(found["top_logprobs"][0].values(), reverse=True) == pytest.approx(wanted.tolist(), abs=1e-4)


def test_only_loopback_and_the_leader_s_pool(server: RunningServer) -> None:
    ranks = engines(server)
    assert set(ranks) == {"engine-0", "engine-1"}
    for process in ranks.values():
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}


def test_a_killed_follower_ends_the_service(server: RunningServer) -> None:
    """The last test of this server: in the middle of a load, so that the leader sits in a collective."""
    shm = set(Path("/dev/shm").iterdir())
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(post, server, COMPLETIONS, {"prompt": p, "max_tokens": 100}) for p in prompts(4)]
        time.sleep(0.3)
        ranks = engines(server)
        ranks["engine-1"].send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert server.process.wait(20) == 70
        assert time.monotonic() - began < 2.0 * slowness()
        for each in running:
            assert each.exception() is not None or each.result().status_code in (200, 500, 503)
    time.sleep(0.1)
    assert "engine-1 died: killed by SIGKILL; the service ends" in server.lines[-1], server.lines[-5:]
    assert not any(process.is_running() for process in ranks.values())
    assert set(Path("/dev/shm").iterdir()) <= shm
    assert not list(Path(server.env["INFERSERVE_RUN_DIR"]).iterdir())


def test_ranks_of_the_fake_engine_stay_in_step(tmp_path: Path) -> None:
    """More rows than the pool holds, as in `test_preemptions_are_counted`; the ranks' states are compared every turn."""
    flags = ("--engine", "fake", "--tp", "3", "--debug-checks", "--fake-kv-tokens", "600", "--router-token-ratio", "1")
    flags = (*flags, "--max-req-total-len", "512", "--disable-dynamic-prompt-cache", "--fake-step-ms", "3")
    with RunningServer(*flags, env={"INFERSERVE_RUN_DIR": str(tmp_path / "r")}) as server:
        post(server, COMPLETIONS, {"prompt": ["Go on"] * 64, "max_tokens": 300, "stop": list("aeio")})
        bodies = [{"prompt": "Go on", "max_tokens": 300, "seed": i} for i in range(8)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: post(server, COMPLETIONS, body), bodies))
        assert all(answer.status_code == 200 for answer in answers)
        server.wait_until_idle(10)
        assert server.metric("num_preemptions_total") > 0
        assert set(engines(server)) == {"engine-0", "engine-1", "engine-2"}
        _mislead(server, "engine-2")
        assert post(server, COMPLETIONS, bodies[0]).status_code != 200
        assert server.process.wait(20) == 70
        assert "engine-2: EngineError: the engine ranks have parted before turn" in server.lines[-1]


def _mislead(server: RunningServer, rank: str) -> None:
    """Send one rank a command that the others do not get."""
    (path,) = Path(server.env["INFERSERVE_RUN_DIR"]).glob(f"boot-*/{rank}.sock")
    with zmq.Context() as context:
        outbox: Outbox[EngineMessage] = Outbox(context, EngineMessage, f"ipc://{path}")
        outbox.send(Commands(10**6))
        outbox.close()


def test_a_replicated_kv_head_and_a_tied_head(tmp_path: Path) -> None:
    truth = make(tmp_path / "m", num_key_value_heads=1, tie_word_embeddings=True)
    with serve(truth, tmp_path / "r", "--max-total-token-num", "1024") as server:
        for prompt in prompts(4):
            assert ask(server, prompt)["text"] == truth.text(prompt)
        assert server.close() == 0
    assert "engine-0" in server.log() and "Traceback" not in server.log()
    assert not list((tmp_path / "r").iterdir())
