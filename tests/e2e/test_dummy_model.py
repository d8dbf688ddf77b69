"""A server of a config.json and nothing else: random weights, a made tokenizer, real steps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.server import RunningServer
from tests.fakes.model_folder import CONFIG


def test_it_serves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 3000}))
    flags = ("--model-dir", str(tmp_path), "--load-format", "dummy", "--served-model-name", "shape", "--device", "cpu")
    asked = {"model": "shape", "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with (
        RunningServer(*flags, env={"INFERSERVE_CACHE": str(tmp_path / "cache")}) as server,
        server.client() as client,
    ):
        body = {**asked, "prompt": list(range(100, 200))}
        answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"] == {**answers[0]["usage"], "prompt_tokens": 100, "completion_tokens": 20}
        text = answers[0]["choices"][0]["text"]
        assert text.isascii() and text.isprintable() and len(text) >= 20
        chat = {**asked, "messages": [{"role": "user", "content": "Any\ntext."}]}
        said = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        assert said.isascii() and said.isprintable() and len(said) >= 20
