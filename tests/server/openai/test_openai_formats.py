"""The form of an answer, with OpenAI's own client: response_format, its typed helpers, regex and grammar."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import pydantic
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.http_clients import only_asyncio
from support.server.openai_peer import (
    MESSAGES,
    async_client,
    constrained_logit_server,
    sync_client,
)

from agentflow.engine.simulator.fake_runner import FakeRunner


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Verdict(pydantic.BaseModel):
    """The requested format."""

    is_science: bool
    mood: Mood
    moods: tuple[Mood, Mood]


anyio_backend = pytest.fixture(only_asyncio)


server = pytest.fixture(constrained_logit_server, scope="module")


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
    # A model that closes each opened object as soon as it may.
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
