"""Responses that run in the background, with OpenAI's client: polled, streamed again, cancelled, limited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.faulty_servers import KEY, failing_engine, tenants
from support.server.openai_peer import sync_client

from agentflow.errors import EngineFailed
from agentflow.server.config.limits import HttpLimits
from agentflow.server.responses.background import EventLog
from agentflow.server.tenants.rate_limit import TenantGate

ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A server whose steps the test can pause."""
    with api_server(FakeEngine(), constraints=False) as running:
        yield running
        running.assert_idle()


def asked(**fields: Any) -> Any:
    fields = {"input": "What do plants do?", "max_output_tokens": 12, "temperature": 0} | fields
    return {"model": MODEL, "background": True, **fields}


def pause(server: ApiServer) -> None:
    server.call(server.engine.gate.allow, 0)


def go_on(server: ApiServer) -> None:
    server.call(server.engine.gate.open)


def has_none(server: ApiServer) -> bool:
    return not server.service.background._runs


def test_a_response_goes_on_without_a_connection(server: ApiServer) -> None:
    pause(server)
    with sync_client(server) as client:
        queued = client.responses.create(**asked())
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        assert client.responses.retrieve(queued.id).status == "queued"
        [item] = client.responses.input_items.list(queued.id)
        assert item.type == "message"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked(previous_response_id=queued.id))
        assert caught.value.param == "previous_response_id"
    go_on(server)
    server.wait_until(lambda: has_none(server))
    with sync_client(server) as client:
        ended = client.responses.retrieve(queued.id)
        same = client.responses.create(**asked(background=False))
        assert (ended.status, ended.output_text) == (same.status, same.output_text)
        assert ended.usage is not None
        assert same.usage is not None
        assert ended.usage.output_tokens == same.usage.output_tokens
        later = client.responses.create(
            **asked(background=False, previous_response_id=ended.id, input="Why?")
        )
        assert later.previous_response_id == ended.id
        # One that has ended is not changed by cancelling it.
        assert client.responses.cancel(ended.id).status == ended.status
        client.responses.delete(ended.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ended.id)


def test_a_stream_goes_on_where_it_broke_off(server: ApiServer) -> None:
    server.call(server.engine.gate.allow, 3)
    with sync_client(server) as client:
        stream = client.responses.create(**asked(stream=True))
        seen: list[Any] = []
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        stream.close()
        created: Any = seen[0]
        assert [event.type for event in seen[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        response_id = created.response.id
        assert client.responses.retrieve(response_id).status == "in_progress"
        go_on(server)
        last = seen[-1].sequence_number
        seen += client.responses.retrieve(response_id, stream=True, starting_after=last)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        end: Any = seen[-1]
        assert end.type in ("response.completed", "response.incomplete")
        deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(deltas) == end.response.output_text
        # Also from the beginning, by several readers, and when it has ended.
        whole = list(client.responses.retrieve(response_id, stream=True))
        assert [event.to_dict() for event in whole] == [event.to_dict() for event in seen]
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []
        assert client.responses.retrieve(response_id).to_dict() == end.response.to_dict()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["cancel", "delete"])
def test_cancelling_frees_what_it_holds(server: ApiServer, stream: bool, way: str) -> None:
    pause(server)
    with sync_client(server) as client:
        if stream:
            events = client.responses.create(**asked(stream=True))
            first: Any = next(iter(events))
            response_id = first.response.id
        else:
            response_id = client.responses.create(**asked()).id
        if way == "delete":
            client.responses.delete(response_id)
        else:
            for _ in range(2):
                assert client.responses.cancel(response_id).status == "cancelled"
            assert client.responses.retrieve(response_id).status == "cancelled"
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**asked(previous_response_id=response_id))
            assert caught.value.param == "previous_response_id"
        go_on(server)
        server.assert_idle()
        assert has_none(server)
        if stream:
            rest: list[Any] = list(events)
            assert rest[-1].response.status == "cancelled"
        if way == "delete":
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)


def test_refused_calls_have_the_field(server: ApiServer) -> None:
    with sync_client(server) as client:
        front = client.responses.create(**asked(background=False, max_output_tokens=1))
        for use, param in (
            (lambda: client.responses.cancel(front.id), "id"),
            (lambda: client.responses.retrieve(front.id, stream=True), "stream"),
            (lambda: client.responses.retrieve(front.id, starting_after=3), "starting_after"),
            (lambda: client.responses.create(**asked(input="x " * 2_000)), "input"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                use()
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_none")
    assert has_none(server)


def test_a_tenant_has_only_so_many_and_others_have_theirs() -> None:
    limits = HttpLimits(max_background_responses=2)
    with api_server(FakeEngine(), limits=limits, constraints=False) as server:
        pause(server)
        with sync_client(server) as client:
            ids = [client.responses.create(**asked()).id for _ in range(2)]
            with pytest.raises(openai.RateLimitError):
                client.responses.create(**asked())
            client.responses.cancel(ids[0])
            client.responses.create(**asked())
            go_on(server)
            server.wait_until(lambda: has_none(server))
            assert client.responses.retrieve(ids[1]).status in ENDED
        assert server.service.bodies.num_bytes == 0
        server.assert_idle()


def test_the_limits_of_the_tenant_apply() -> None:
    known = tenants("requests_per_minute = 2", "max_unfinished = 1")
    with api_server(FakeEngine(), tenants=known, gate=TenantGate(), constraints=False) as server:
        pause(server)
        with sync_client(server, api_key=KEY) as client:
            first = client.responses.with_raw_response.create(**asked())
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            with pytest.raises(openai.RateLimitError):
                client.responses.create(**asked())
            client.responses.cancel(first.parse().id)
            go_on(server)
            client.responses.create(**asked())
            server.wait_until(lambda: has_none(server))
            with pytest.raises(openai.RateLimitError):
                client.responses.create(**asked())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_the_end_of_the_response(stream: bool) -> None:
    with api_server(failing_engine(EngineFailed("it broke"), after_steps=2), constraints=False) as server:
        with sync_client(server) as client:
            created = client.responses.create(**asked(stream=stream))
            if stream:
                events: list[Any] = list(created)
                assert events[-1].type == "response.failed"
                failed = events[-1].response
            else:
                server.wait_until(lambda: has_none(server))
                failed = client.responses.retrieve(created.id)
            assert failed.status == "failed"
            assert failed.error.code == "server_error"
        server.call(server.service.calls.until_none)  # a body is released after the answer
        assert server.service.bodies.num_bytes == 0


def test_a_server_that_stops_ends_what_runs() -> None:
    with api_server(FakeEngine(), constraints=False) as server:
        pause(server)
        with sync_client(server) as client:
            client.responses.create(**asked())
        go_on(server)


def test_pages_of_input_items(server: ApiServer) -> None:
    items: Any = [{"role": "user", "content": f"{number}"} for number in range(7)]
    with sync_client(server) as client:
        response = client.responses.create(**asked(background=False, input=items, max_output_tokens=1))

        def texts(**fields: Any) -> list[str]:
            pages: Any = client.responses.input_items.list(response.id, **fields)
            return [item.content[0].text for item in pages]

        assert texts() == texts(limit=2) == ["6", "5", "4", "3", "2", "1", "0"]
        assert texts(order="asc", limit=3) == ["0", "1", "2", "3", "4", "5", "6"]
        page = client.responses.input_items.list(response.id, limit=2, order="asc")
        assert page.has_more
        after = page.data[1].id
        assert after is not None
        assert texts(order="asc", after=after) == ["2", "3", "4", "5", "6"]
        for fields, param in (({"limit": 0}, "limit"), ({"after": "x"}, "after"), ({"order": "x"}, "order")):
            with pytest.raises(openai.BadRequestError) as caught:
                texts(**fields)
            assert caught.value.param == param


@pytest.mark.anyio
@given(sizes=st.lists(st.integers(0, 40), max_size=30), start=st.integers(0, 400))
async def test_readers_of_a_log_receive_each_event_once(sizes: list[int], start: int) -> None:
    log = EventLog()
    events = [b"data: %d\n\n" % number for number in range(sum(sizes))]
    read: list[bytes] = []

    async def follow() -> None:
        async for some in log.since(start):
            read.append(some)

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        first = 0
        for size in sizes:
            log.add(b"".join(events[first : first + size]))
            first += size
            await anyio.lowlevel.checkpoint()
        log.end()
    assert b"".join(read) == b"".join(events[start:])
