"""Plain requests to the server of a page, next to the browser's."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit


def get(url: str, path: str, key: str | None = None, body: Any = None) -> str:
    """The answer of the server, which must be a success."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == 200, text
    return text


def complete(url: str, prompt: str, key: str | None = None, **more: Any) -> None:
    """One completion of the server's first model."""
    model = json.loads(get(url, "/v1/models", key))["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    get(url, "/v1/completions", key, body)
