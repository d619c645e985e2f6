"""Requests of Ollama's API as its clients send them, and their answers and streams, each line checked."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from support.api_server import MODEL, ApiServer

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What do plants do?"}]
SAME = {"seed": 3, "num_predict": 12}
"""Options for a short answer that repeats."""


def post(server: ApiServer, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """The response. A field of None is left out."""
    body = {"model": MODEL, **fields}
    sent = {name: value for name, value in body.items() if value is not None}
    return httpx2.post(f"{server.url}/api/{path}", json=sent, headers=headers, timeout=60)


def answer(server: ApiServer, path: str, **fields: Any) -> dict[str, Any]:
    """The whole answer."""
    response = post(server, path, stream=False, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


def lines(server: ApiServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of the stream, which is the default. Only the last one says that the answer is done."""
    response = post(server, path, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return read_lines(response.text)


def read_lines(text: str) -> list[dict[str, Any]]:
    """The lines of a whole stream."""
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.splitlines()]
    assert [one["done"] for one in found] == [*[False] * (len(found) - 1), True]
    return found


def error(server: ApiServer, path: str, **fields: Any) -> tuple[int, str, str | None]:
    """The status, the code and the field of an error."""
    response = post(server, path, **fields)
    body = response.json()
    assert isinstance(body["error"], str)
    assert response.headers["x-request-id"]
    return response.status_code, body["code"], body["param"]
