"""The form of an answer, with OpenAI's own client: response_format, its typed helpers, regex and grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pydantic
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.http_clients import CLIENTS, ClientKind, only_asyncio
from support.server.openai_peer import MESSAGES, async_client, called, logit_engine_of_server, sync_client

from agentflow.engine.fake_runner import FakeRunner


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Verdict(pydantic.BaseModel):
    """The requested format."""

    is_science: bool
    mood: Mood
    moods: tuple[Mood, Mood]


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(logit_engine_of_server()) as running:
        yield running
        running.assert_idle()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parse_gives_the_value(server: ApiServer, seed: int) -> None:
    with sync_client(server) as client:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Verdict, seed=seed
        )
    message = parsed.choices[0].message
    assert message.parsed == Verdict.model_validate_json(message.content or "")
    assert parsed.choices[0].finish_reason == "stop"


@pytest.mark.anyio
async def test_parse_async_and_streamed(server: ApiServer) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Verdict, "seed": 4}
    async with async_client(server) as client:
        parsed = await client.chat.completions.parse(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
    with sync_client(server) as client, client.chat.completions.stream(**asked) as stream:
        sync_final = stream.get_final_completion()
    values = [end.choices[0].message.parsed for end in (parsed, final, sync_final)]
    assert isinstance(values[0], Verdict)
    assert values == [values[0]] * 3


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_holds_strict_or_not(server: ApiServer, strict: bool | None) -> None:
    schema = {"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 2, "maxItems": 4}
    spec = {"name": "list", "schema": schema, "strict": strict}
    with sync_client(server) as client:
        whole = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": spec},  # type: ignore[arg-type]
            logprobs=True,
        )
    value = json.loads(whole.choices[0].message.content or "")
    assert 2 <= len(value) <= 4
    assert set(value) <= {1, "two", None}
    reported = whole.choices[0].logprobs
    assert reported is not None
    assert b"".join(bytes(token.bytes) for token in reported.content or ()).decode().startswith("[")


def test_any_object() -> None:
    # A model that closes what it has opened as soon as it may.
    closing = TOKENIZER.encode("}")[0]
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=256, next_token=lambda seen: closing)
    with api_server(FakeEngine(runner=runner)) as server, sync_client(server) as client:
        for spec in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
            whole = client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                response_format=spec,  # type: ignore[arg-type]
            )
            assert json.loads(whole.choices[0].message.content or "") == {}
            assert whole.choices[0].finish_reason == "stop"


def test_any_object_may_hold_anything(server: ApiServer) -> None:
    """The answer is the beginning of an object, wherever the limit truncates it."""
    seen = set()
    with sync_client(server) as client:
        for seed in range(6):
            whole = client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                response_format={"type": "json_object"},
                seed=seed,
                max_tokens=40,
            )
            text = whole.choices[0].message.content or ""
            assert re.match(r'\{(\}|"|$)', text)
            if whole.choices[0].finish_reason == "stop":
                assert isinstance(json.loads(text), dict)
            seen.add(text)
    assert len(seen) > 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("form", "pattern"),
    [({"regex": "[ab]{3}"}, "[ab]{3}"), ({"grammar": 'start: "yes" | "no" " thanks"'}, "yes|no thanks")],
    ids=["regex", "grammar"],
)
def test_regex_and_grammar(
    server: ApiServer, form: dict[str, str], pattern: str, kind: ClientKind, stream: bool
) -> None:
    common: dict[str, Any] = {"model": MODEL, "extra_body": form, "stream": stream}
    chat = called(server, kind, "chat.completions.create", messages=MESSAGES, **common)
    text = called(server, kind, "completions.create", prompt="So", **common)
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        written = "".join(chunk.choices[0].text for chunk in text)
    else:
        said, written = chat.choices[0].message.content, text.choices[0].text
    assert re.fullmatch(pattern, said)
    assert re.fullmatch(pattern, written)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("form", ["json_object", "json_schema", "text"])
def test_each_format(server: ApiServer, form: str, kind: ClientKind, stream: bool) -> None:
    schema = {"name": "flags", "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}
    asked: Any = {"type": form} | ({"json_schema": schema} if form == "json_schema" else {})
    answer = called(
        server,
        kind,
        "chat.completions.create",
        model=MODEL,
        messages=MESSAGES,
        response_format=asked,
        seed=5,
        max_tokens=40,
        stream=stream,
    )
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        said = answer.choices[0].message.content
    if form == "json_schema":
        assert set(json.loads(said)) <= {True, False}
    assert said.startswith("{") == (form == "json_object")
