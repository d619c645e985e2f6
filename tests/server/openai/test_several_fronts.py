"""Responses and conversations at two servers that share a store, with OpenAI's client."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.redis_server import RedisServer, redis_server
from support.server.openai_peer import sync_client

from agentflow.server.responses.shared_store import SharedResponses
from agentflow.server.responses.store import StoredResponse
from agentflow.server.stores import fronts
from agentflow.server.stores.shared import SharedStore


@pytest.fixture(scope="module", autouse=True)
def _short_beats() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "BEAT_S", 0.05)
        yield


@contextmanager
def server_of(redis: RedisServer, prefix: str, name: str) -> Iterator[ApiServer]:
    shared = SharedStore(redis.url, prefix=prefix, front=name)
    with api_server(FakeEngine(), constraints=False, shared=shared) as running:
        yield running


@pytest.fixture(scope="module")
def two(redis: RedisServer) -> Iterator[tuple[ApiServer, ApiServer]]:
    prefix = f"{secrets.token_hex(8)}:"
    with server_of(redis, prefix, "a") as here, server_of(redis, prefix, "b") as there:
        yield here, there


def asked(**fields: Any) -> Any:
    return {"model": MODEL, "input": "What do plants do?", "max_output_tokens": 8, "temperature": 0} | fields


def test_another_server_continues_responses_and_conversations(two: tuple[ApiServer, ApiServer]) -> None:
    with sync_client(two[0]) as here, sync_client(two[1]) as there:
        first = here.responses.create(**asked())
        assert first.id.startswith("resp_a-")
        assert there.responses.retrieve(first.id).output_text == first.output_text
        second = there.responses.create(**asked(input="Why?", previous_response_id=first.id))
        turns: Any = [
            {"role": "user", "content": "What do plants do?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Why?"},
        ]
        assert second.output_text == there.responses.create(**asked(input=turns)).output_text
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        [item] = there.responses.input_items.list(first.id)
        reference: Any = [{"type": "item_reference", "id": item.id}]
        referred = there.responses.create(**asked(input=reference))
        assert referred.output_text == first.output_text
        talk = here.conversations.create()
        there.responses.create(**asked(conversation=talk.id))
        here.responses.create(**asked(conversation=talk.id, input="Why?"))
        assert len(there.conversations.items.list(talk.id).data) == 4
        there.conversations.delete(talk.id)
        there.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            here.conversations.retrieve(talk.id)
        with pytest.raises(openai.NotFoundError):
            here.responses.retrieve(first.id)


def test_another_server_shows_and_cancels_what_runs_in_the_background(
    two: tuple[ApiServer, ApiServer],
) -> None:
    here, there = two
    here.call(here.engine.gate.allow, 2)
    with sync_client(here) as own, sync_client(there) as other:
        queued = own.responses.create(**asked(background=True, max_output_tokens=50))
        assert other.responses.retrieve(queued.id).status in ("queued", "in_progress")
        assert len(other.responses.input_items.list(queued.id).data) == 1
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**asked(previous_response_id=queued.id))
        assert other.responses.cancel(queued.id).status == "cancelled"
        assert own.responses.retrieve(queued.id).status == "cancelled"
        deleted = own.responses.create(**asked(background=True, max_output_tokens=50))
        other.responses.delete(deleted.id)
        with pytest.raises(openai.NotFoundError):
            own.responses.retrieve(deleted.id)
    here.call(here.engine.gate.open)
    here.assert_idle()


def test_another_server_streams_the_events_of_a_response_while_it_runs(
    two: tuple[ApiServer, ApiServer],
) -> None:
    here, there = two
    here.call(here.engine.gate.allow, 3)
    with sync_client(here) as own, sync_client(there) as other:
        stream = own.responses.create(**asked(background=True, stream=True))
        first = next(iter(stream))
        elsewhere = iter(other.responses.retrieve(first.response.id, stream=True))
        assert next(elsewhere) == first
        here.call(here.engine.gate.open)
        assert list(elsewhere) == list(stream)
        response_id = first.response.id
        later = other.responses.retrieve(response_id, stream=True, starting_after=3)
        assert next(iter(later)).sequence_number == 4
        plain = own.responses.create(**asked(background=True))
        with pytest.raises(openai.BadRequestError):
            other.responses.retrieve(plain.id, stream=True)


def test_a_response_that_was_lost_with_its_server_has_failed(two: tuple[ApiServer, ApiServer]) -> None:
    here, there = two
    with sync_client(here) as own, sync_client(there) as other:
        ended = own.responses.create(**asked())
        responses = here.service.responses
        assert isinstance(responses, SharedResponses)
        running = StoredResponse(ended.id, ended.model_dump_json().encode(), None, (), (), is_background=True)
        here.call(partial(responses._add, "", running, runs_on="gone"))
        for client in (other, own, other):
            lost = client.responses.retrieve(ended.id)
            assert lost.status == "failed"
            assert lost.error is not None
            assert lost.error.code == "server_error"
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**asked(previous_response_id=ended.id))


def test_without_its_store_a_server_serves_what_needs_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_server(tmp_path_factory.mktemp("redis")) as redis, server_of(redis, "p:", "a") as server:
        body = {"model": MODEL, "input": "x", "max_output_tokens": 4}
        kept = httpx2.post(f"{server.url}/v1/responses", json=body).json()
        redis.stop()
        found = httpx2.get(f"{server.url}/v1/responses/{kept['id']}")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "overloaded")
        assert int(found.headers["retry-after"]) >= 1
        assert httpx2.post(f"{server.url}/v1/responses", json=body).status_code == 503
        assert httpx2.post(f"{server.url}/v1/responses", json=body | {"store": False}).status_code == 200
        redis.start()
        deadline = 50
        while httpx2.get(f"{server.url}/v1/responses/{kept['id']}").status_code != 404:
            deadline -= 1
            assert deadline
        assert httpx2.post(f"{server.url}/v1/responses", json=body).status_code == 200
        assert json.loads(found.content)
