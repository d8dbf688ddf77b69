"""Small ways to ask the server: raw SSE events, S and N pairs."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.e2e.server import RunningServer

Body = dict[str, Any]


def post(server: RunningServer, path: str, body: Body) -> httpx.Response:
    """POST JSON."""
    with server.client() as client:
        return client.post(path, json=body)


def events(server: RunningServer, path: str, body: Body) -> list[Body | str]:
    """All SSE events of a streamed request, decoded; `[DONE]` stays a string. Checks the framing strictly."""
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        raw = response.read().decode()
        assert response.status_code == 200, raw
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
    assert raw.endswith("\n\n")
    out: list[Body | str] = []
    for block in raw[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    assert out[-1] == "[DONE]"
    return out


def chunks(server: RunningServer, path: str, body: Body) -> list[Body]:
    """Events without the `[DONE]`."""
    return [e for e in events(server, path, body) if isinstance(e, dict)]


def streamed_text(items: list[Body], index: int = 0) -> str:
    """Joined text of one choice of a stream (chat or completions)."""
    out = ""
    for chunk in items:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                out += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return out


def text_of(answer: Body, index: int = 0) -> str:
    """Text of one choice of an unstreamed answer."""
    choice = answer["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def both(server: RunningServer, path: str, body: Body) -> tuple[Body, list[Body]]:
    """The same request unstreamed and streamed."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json(), chunks(server, path, body)


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
