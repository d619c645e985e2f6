"""Requests that are refused before anything runs: each has its status, code and field, in every API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import embedding_engine
from support.server.apis import CHAT, MESSAGES, OLLAMA, SGLANG, Api, post, refused
from support.server.module_servers import module_server
from support.server.openai_peer import logit_engine_of_server
from support.server.refused_requests import (
    EMBEDDING,
    FAR,
    GENERATING,
    MAX_CONTEXT,
    SIZE,
    UNSUPPORTED,
    VALID,
    Row,
    label,
)

from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.server.config.limits import HttpLimits

pytestmark = pytest.mark.timeout(60)


# However often streams are kept alive, a request that is refused has its status.
generating = module_server(logit_engine_of_server, limits=HttpLimits(stream_keepalive_s=0.01))


@pytest.fixture(scope="module")
def embedding() -> Iterator[ApiServer]:
    limits = HttpLimits(max_embedding_inputs=8, max_embedding_tokens=200)
    folder = EmbeddingFolder(("lasttoken",), (None,), prompts={"query": "Question: "})
    engine = embedding_engine(SIZE, MAX_CONTEXT)
    with api_server(engine, constraints=False, limits=limits, embedding=folder) as running:
        yield running
        running.assert_idle()


def api_of(path: str) -> Api:
    """The API whose errors this path has."""
    return MESSAGES if path.startswith("/v1/messages") else OLLAMA if path.startswith("/api/") else CHAT


def each(table: dict[str, list[Row]]) -> Any:
    cases = [
        pytest.param(path, *row, id=f"{path} {label(row)}") for path, rows in table.items() for row in rows
    ]
    return pytest.mark.parametrize(("path", "fields", "param", "code"), cases)


def check(server: ApiServer, path: str, fields: dict[str, Any], param: str | None, code: str) -> None:
    body = {"model": MODEL, **VALID[path], **fields}
    status, found, field = refused(server, api_of(path), body, path=path)
    assert (status, found) == (400, code)
    assert param in (None, field)


@each(GENERATING)
def test_a_request(
    generating: ApiServer, path: str, fields: dict[str, Any], param: str | None, code: str
) -> None:
    check(generating, path, fields, param, code)


@each(EMBEDDING)
def test_an_embedding(embedding: ApiServer, path: str, fields: dict[str, Any], param: str, code: str) -> None:
    check(embedding, path, fields, param, code)


@pytest.mark.parametrize(
    ("api", "words"),
    [(CHAT, r"This model's maximum context length is \d+ tokens"), (MESSAGES, "prompt is too long: ")],
)
def test_a_prompt_that_is_too_long_has_the_words_that_clients_look_for(
    generating: ApiServer, api: Api, words: str
) -> None:
    for prompt, is_long in ((FAR, True), (FAR[:600], True), ([], False)):
        message = post(generating, api, {**api.body(prompt), "stream": True}).json()["error"]["message"]
        assert (re.match(words, message) is not None) == is_long


def test_null_is_the_same_as_leaving_an_unsupported_field_out(generating: ApiServer) -> None:
    names = [param for _, param, code in GENERATING[SGLANG.path] if code == UNSUPPORTED]
    sampling = {name.partition(".")[2]: None for name in names if "." in name}
    fields = {name: None for name in names if "." not in name}
    body = SGLANG.body("a", max_tokens=2, extra={"sampling_params": sampling, **fields})
    assert len(body) + len(sampling) > 15
    assert post(generating, SGLANG, body).status_code == 200
