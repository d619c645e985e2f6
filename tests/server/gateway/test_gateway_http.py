"""Requests through the gateway, before servers that play scripts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from support.apis.fake_server import (
    Answer,
    AnyAnswer,
    Close,
    Forever,
    Hold,
    RawAnswer,
    Received,
    Reset,
    fake_server,
)
from support.server.gateways import (
    CHAT,
    Play,
    completion,
    json_answer,
    models,
    refused,
    routed,
    routed_fakes,
)
from support.server.http_clients import only_asyncio

from agentflow.cluster.routing.text_router import TextRouter
from agentflow.runtime.circuit import MAX_FAILURES, MAX_PAUSE_S, Circuit
from agentflow.runtime.task_group import open_task_group
from agentflow.server.gateway import target as target_module
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.http import protocol

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
anyio_backend = pytest.fixture(only_asyncio)
EVENTS = "text/event-stream"
POST = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
PAGE = (Path(__file__).parents[3] / "docs/reference/gateway-metrics.md").read_text(encoding="utf-8")


def always(answer: AnyAnswer) -> Play:
    return lambda request: answer


def unexpected(request: Received) -> AnyAnswer:
    raise AssertionError(f"unexpected: {request}")


ok = always(completion())


async def test_a_request_and_its_answer_pass_unchanged() -> None:
    raw = b'{"a" :1,\n"b":"\\u00e9"}'
    play = always(Answer(b"\x00\xffbytes", 201, {"x-mine": "1", "Set-Cookie": "a=b"}, "application/odd"))
    async with routed_fakes(play) as route:
        got = await route.http.request(
            "PATCH",
            "/v1/anything/a%20b?x=%2F&y",
            content=raw,
            headers={"authorization": "Bearer k", "connection": "x-hop", "x-hop": "1", "x-kept": "2"},
        )
        assert (got.status_code, got.content) == (201, b"\x00\xffbytes")
        assert (got.headers["content-type"], got.headers["x-mine"]) == ("application/odd", "1")
        assert (got.headers["set-cookie"], got.headers["x-agentflow-target"]) == ("a=b", "0")
        [asked] = route.asked(0)
        assert (asked.method, asked.path, asked.body) == ("PATCH", "/v1/anything/a%20b?x=%2F&y", raw)
        assert asked.headers["host"] == route.fakes[0].url.removeprefix("http://")
        assert (asked.headers["authorization"], asked.headers["x-kept"]) == ("Bearer k", "2")
        assert not asked.headers.keys() & {"x-hop", "connection"}
        assert asked.headers["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"", 204, content_type=None),
        Answer(b"", 304, {"etag": "1"}, None),
        Answer([b"a", b"b" * 100_000, b"c"]),
        RawAnswer([b"HTTP/1.1 200 OK\r\n\r\nuntil the end"]),
        RawAnswer([b"HTTP/1.1 103 Early\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]),
    ],
)
async def test_answers_of_any_framing(answer: AnyAnswer) -> None:
    async with routed_fakes(always(answer)) as route:
        got = await route.http.get("/v1/x")
        if isinstance(answer, Answer):
            expected = answer.body if isinstance(answer.body, bytes) else b"ab" + b"b" * 99_999 + b"c"
            assert (got.status_code, got.content) == (answer.status, expected)
        else:
            assert (got.status_code, got.content) in [(200, b"until the end"), (200, b"ok")]


async def test_head_has_no_body() -> None:
    head = RawAnswer([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"])
    async with routed_fakes(always(head)) as route:
        got = await route.http.head("/v1/files")
        assert (got.status_code, got.headers["content-length"], got.content) == (200, "5", b"")


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (b"/v1/%7Ea//b?x=a+b&&", "/v1/%7Ea//b?x=a+b&&"),
        (b"http://other.example/v1/x", "/v1/x"),
        (b"//other.example/v1/x", "//other.example/v1/x"),
    ],
)
async def test_addresses_of_many_forms(sent: bytes, received: str) -> None:
    async with routed_fakes(ok) as route:
        async with route.sending(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % sent) as client:
            got = await client.receive()
        assert got.startswith(b"HTTP/1.1 200 ")
        assert [one.path for one in route.asked(0)] == [received]


async def test_a_target_whose_address_has_a_path() -> None:
    async with (
        fake_server(lambda request: models("m")) as server,
        routed([f"{server.url}/open/ai/v1/"]) as route,
    ):
        assert (await route.chat()).status_code == 200
        paths = [one.path for one in server.received]
        assert paths == ["/open/ai/v1/models", "/open/ai/metrics", f"/open/ai{CHAT}"]


@pytest.mark.parametrize("path", [b"/../x", b"/v1/%2e%2e/x", b"/a/..", b"/%2e./x", b"*"])
async def test_a_path_that_is_none_or_leaves_the_address_of_a_target(path: bytes) -> None:
    async with routed_fakes(ok) as route:
        async with route.sending(b"OPTIONS %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path) as client:
            got = await client.receive()
        assert got.startswith(b"HTTP/1.1 400 ")
        assert route.asked(0) == []


async def test_events_pass_one_by_one() -> None:
    hold = Hold()
    first, last = b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"
    async with (
        routed_fakes(always(Answer([first, hold, last], content_type=EVENTS))) as route,
        route.http.stream("POST", CHAT, json={"model": "m", "stream": True}) as got,
    ):
        parts = got.aiter_raw()
        assert await anext(parts) == first
        assert not hold.is_over.is_set()
        hold.go_on()
        assert b"".join([part async for part in parts]) == last


async def test_a_client_that_leaves_cancels_the_request() -> None:
    stream = Answer([b"data: 1\n\n", Forever(b"data: 2\n\n")], content_type=EVENTS)
    silent = Answer([Hold()])
    for answer in (stream, silent):
        async with routed_fakes(always(answer)) as route, open_task_group() as group:
            group.start_soon(route.chat)
            await route.fakes[0].wait_until(lambda: bool(route.asked(0)))
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await route.fakes[0].wait_until_gone()
                with anyio.fail_after(10):
                    await route.gateway.until_idle()
                assert route.gateway.targets[0].num_running == 0


async def test_f37_a_client_that_has_sent_another_request_and_leaves_cancels_the_first() -> None:
    async with routed_fakes(always(Answer([Hold()]))) as route:
        async with route.sending(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2):
            await route.fakes[0].wait_until(lambda: bool(route.asked(0)))
        await route.fakes[0].wait_until_gone()
        with anyio.fail_after(10):
            await route.gateway.until_idle()
        assert len(route.asked(0)) == 1


LOST: dict[str, AnyAnswer] = {
    "reset": RawAnswer([Reset()]),
    "closed": RawAnswer([Close()]),
    "cut in the head": RawAnswer([b"HTTP/1.1 200 OK\r\ncont"]),
    "no HTTP": RawAnswer([b"SSH-2.0\r\n"]),
    "cut before the first part": Answer([Close()], content_type=EVENTS),
    "an endless head": RawAnswer([b"HTTP/1.1 200 OK\r\nx: ", Forever(b"y" * 5_000)]),
}


@pytest.mark.parametrize("name", LOST)
async def test_another_target_has_a_request_whose_answer_did_not_begin(name: str) -> None:
    async with routed_fakes(always(LOST[name]), always(LOST[name])) as route:
        route.gateway.targets[0].busy_until_s[""] = 1e12  # so that the other one is first
        route.fakes[0]._script = ok
        got = await route.chat()
        assert (got.status_code, got.headers["x-agentflow-target"]) == (200, "0")
        assert (len(route.asked(0)), len(route.asked(1))) == (1, 1)
        assert route.asked(0)[0].body == route.asked(1)[0].body
        assert route.gateway.proxy.retries == {"lost": 1}


@pytest.mark.parametrize("status", [429, 502, 503, 504, 529])
async def test_another_target_has_a_request_that_was_refused(status: int) -> None:
    def play(request: Received) -> AnyAnswer:
        return refused(status, retry_after="7") if len(everything) == 0 else completion()

    everything: list[int] = []
    async with routed_fakes(play, play) as route:
        got = await route.chat()
        assert (got.status_code, got.headers["retry-after"]) == (status, "7")
        assert [len(route.asked(number)) for number in (0, 1)] == [1, 1]
        for target in route.gateway.targets:
            target.busy_until_s.clear()
        everything.append(1)
        assert (await route.chat()).status_code == 200


async def test_a_refusal_without_an_end() -> None:
    endless = Answer([b"x", Forever(b"y" * 10_000)], 503)
    async with routed_fakes(always(endless), ok) as route:
        route.gateway.targets[1].busy_until_s[""] = 1e12
        assert (await route.chat()).status_code == 200
        await route.fakes[0].wait_until_gone()


@pytest.mark.parametrize("status", [503, 529])
async def test_a_busy_target_is_left_alone(status: int) -> None:
    async with routed_fakes(always(refused(status, retry_after="20")), ok) as route:
        for number in range(6):
            assert (await route.chat(f"{number} " * 400)).status_code == 200
        assert len(route.asked(0)) <= 1


async def test_f37_a_target_without_one_model_is_asked_for_the_others() -> None:
    def play(request: Received) -> AnyAnswer:
        is_lost = json.loads(request.body)["model"] == "m:lost"
        return refused(503, retry_after="20") if is_lost else completion()

    async with routed_fakes(play, ok, limits=GatewayLimits(check_s=1e6)) as route:
        route.gateway.targets[0].models = frozenset(["m", "m:lost"])
        for model in ("m:lost", "m", "m"):
            got = await route.http.post(CHAT, json={"model": model, "messages": []})
            assert got.status_code == (503 if model == "m:lost" else 200)
        assert route.asked(1) == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500, 501])
async def test_other_errors_pass_and_are_not_repeated(status: int) -> None:
    play = always(refused(status))
    async with routed_fakes(play, play) as route:
        got = await route.http.post(CHAT, json={"messages": []})
        assert (got.status_code, got.json()["error"]["code"]) == (status, f"e{status}")
        assert len(route.asked(0) + route.asked(1)) == 1


async def test_a_request_that_ends_its_servers_is_not_sent_to_all() -> None:
    play = always(RawAnswer([Reset()]))
    async with routed_fakes(play, play, play) as route:
        got = await route.chat()
        assert (got.status_code, got.json()["error"]["code"]) == (502, "target_failed")
        assert sum(len(route.asked(number)) for number in range(3)) == 2


@pytest.mark.parametrize(
    ("path", "place"),
    [(CHAT, ["error", "message"]), ("/v1/messages", ["error", "message"]), ("/api/chat", ["error"])],
)
async def test_the_gateways_own_errors_have_the_format_of_the_api(path: str, place: list[str]) -> None:
    async with routed_fakes(always(RawAnswer([Reset()]))) as route:
        got = await route.http.post(path, json={"model": "m"})
        assert got.status_code == 502
        found: Any = got.json()
        for name in place:
            found = found[name]
        assert isinstance(found, str)


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    broken = Answer([b'data: {"a": 1}\n\n', Reset()], content_type=EVENTS)
    async with routed_fakes(always(broken), always(broken)) as route:
        got = await route.chat(stream=True)
        [first, error] = [line for line in got.text.splitlines() if line.startswith("data:")]
        assert json.loads(first.removeprefix("data: ")) == {"a": 1}
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "target_failed"
        assert len(route.asked(0) + route.asked(1)) == 1  # never repeated


@pytest.mark.parametrize("sent", [[b'{"a": 1}\n'], [b'{"a": 1}\n', b'{"a": 2}\n{"a'], []], ids=range(3))
async def test_f37_a_stream_of_lines_that_breaks_ends_with_an_error(sent: list[bytes]) -> None:
    """In Ollama's API, each line is an event, and an empty line is none."""
    broken = Answer([*sent, Reset()], content_type="application/x-ndjson; charset=utf-8")
    async with routed_fakes(always(broken)) as route:
        got = await route.http.post("/api/chat", json={"model": "m"})
        if not sent:
            assert got.status_code == 502
            assert got.json()["code"] == "target_failed"
            return
        *lines, error = got.content.splitlines()
        assert json.loads(error)["code"] == "target_failed"
        assert lines == b"".join(sent).splitlines()
        assert route.gateway.targets[0].num_running == 0


async def test_a_body_that_breaks_is_not_complete_for_the_client() -> None:
    broken = RawAnswer([b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc", Reset()])
    async with routed_fakes(always(broken)) as route:
        with pytest.raises(Exception, match=r"(?i)peer|closed|incomplete"):
            await route.chat()


LINES = b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("path", "framing", "begun"),
    [
        ("/v1/files/f/content", b"transfer-encoding: chunked", b"%x\r\n%b\r\n" % (len(LINES), LINES)),
        ("/v1/files/f/content", b"content-length: 1000", LINES),
        ("/api/blobs", b"content-length: 1000", LINES),
        ("/api/blobs", b"content-length: 10", LINES),
    ],
)
async def test_f37_a_file_of_lines_that_breaks_is_not_complete_for_the_client(
    path: str, framing: bytes, begun: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no stream of this API, whose errors it cannot have."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\n" + framing + b"\r\n\r\n"
    async with routed_fakes(always(RawAnswer([head + begun, Reset()]))) as route:
        with pytest.raises(Exception, match=r"(?i)peer|closed|incomplete"):
            await route.http.get(path)
    assert [record for record in caplog.records if record.exc_info] == []


async def test_targets_that_do_not_answer_in_time() -> None:
    hold = Answer([b"data: 1\n\n", Hold()], content_type=EVENTS)
    async with routed_fakes(always(Answer([Hold()])), limits=GatewayLimits(first_byte_s=0.2)) as route:
        got = await route.chat()
        assert (got.status_code, got.json()["error"]["code"]) == (504, "timeout")
    async with routed_fakes(always(hold), limits=GatewayLimits(stall_s=0.2)) as route:
        got = await route.chat(stream=True)
        assert '"target_failed"' in got.text


async def test_a_target_that_is_gone_gets_nothing_until_it_answers_again() -> None:
    async with routed_fakes(ok, ok) as route:
        gone, other = route.gateway.targets
        await gone.check(_Gone(), None)
        assert (gone.is_up, other.is_up) == (False, True)
        for number in range(4):
            assert (await route.chat(f"{number} " * 300)).headers["x-agentflow-target"] == "1"
        await route.gateway.check_all()
        assert gone.is_up
        other.is_draining = True
        assert (await route.chat()).headers["x-agentflow-target"] == "0"


class _Gone(httpx2.AsyncBaseTransport):
    async def handle_async_request(self, request: Any) -> Any:
        raise httpx2.ConnectError("refused")


async def test_requests_go_where_their_model_is() -> None:
    def having(*names: str) -> Play:
        return lambda request: models(*names) if request.path == "/v1/models" else completion()

    async with routed_fakes(having(), having()) as route:
        for fake, names in zip(route.fakes, (("a", "both"), ("b", "both")), strict=True):
            fake._script = having(*names)
        await route.gateway.check_all()
        for name, number in (("a", "0"), ("b", "1")):
            for text in range(4):
                got = await route.chat(f"{text} " * 300, model=name)
                assert got.headers["x-agentflow-target"] == number
        listed = (await route.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["a", "both", "b"]
        assert (await route.http.get("/v1/models/b")).headers["x-agentflow-target"] == "1"
        route.gateway.targets[1].is_draining = True
        got = await route.chat(model="b")
        assert (got.status_code, got.json()["error"]["code"]) == (503, "no_target")
        assert int(got.headers["retry-after"]) > 0
        assert (await route.chat(model="unknown")).status_code == 200  # a target decides


@pytest.mark.parametrize("listed", ["b", "b:latest"])
@pytest.mark.parametrize("asked", ["b", "b:latest"])
async def test_f37_a_model_is_found_with_and_without_latest(listed: str, asked: str) -> None:
    def having(name: str) -> Play:
        return lambda request: models(name) if request.path == "/v1/models" else completion()

    async with routed_fakes(having(""), having("")) as route:
        for fake, name in zip(route.fakes, ("a", listed), strict=True):
            fake._script = having(name)
        await route.gateway.check_all()
        for text in range(4):
            got = await route.chat(f"{text} " * 300, model=asked)
            assert got.headers["x-agentflow-target"] == "1"
        assert (await route.http.get(f"/v1/models/{asked}")).headers["x-agentflow-target"] == "1"
        route.gateway.targets[1].pause("b", 60.0)
        assert route.gateway.targets[1].is_busy("b")
        assert not route.gateway.targets[1].is_busy("a")


async def test_f37_models_that_have_left_all_servers_are_forgotten() -> None:
    """A server that loads and unloads adapters lists many in its life. A request in progress still ends."""
    listed, hold = ["first"], Hold()

    def play(request: Received) -> AnyAnswer:
        if request.path == "/v1/models":
            return models(*listed)
        return Answer([hold]) if b"wait" in request.body else completion()

    async with routed_fakes(play) as route:
        route.fakes[0]._script = play
        await route.gateway.check_all()
        async with open_task_group() as group:
            group.start_soon(lambda: route.chat("wait", model="first"))
            await hold.reached.wait()
            for name in ("second", "third", "third"):
                listed[:] = [name]
                await route.gateway.check_all()
                assert (await route.chat(model=name)).status_code == 200
                assert (await route.chat(model="unknown")).status_code == 200
            hold.go_on()
        assert {*route.gateway.placement._routers} == {"", "third"}
        assert route.gateway.targets[0].num_running == 0


async def test_conversations_stay_and_others_are_spread() -> None:
    hold = Hold()

    def play(request: Received) -> AnyAnswer:
        return Answer([hold, completion().body]) if not hold.is_over.is_set() else completion()

    async with routed_fakes(play, play) as route:
        places: dict[int, list[str]] = {number: [] for number in range(6)}

        async def turn(number: int, length: int) -> None:
            asked = [{"role": "user", "content": f"{number} {'x y ' * 500} {at}"} for at in range(length)]
            got = await route.http.post(CHAT, json={"model": "m", "messages": asked})
            places[number].append(got.headers["x-agentflow-target"])

        async with open_task_group() as group:
            for number in places:
                group.start_soon(turn, number, 1)
            for fake in route.fakes:
                await fake.wait_for_requests(5)
            hold.go_on()
        for length in range(2, 5):
            for number in places:
                await turn(number, length)
        assert all(len(set(where)) == 1 for where in places.values())
        proxy = route.gateway.proxy
        assert sum(proxy.num_hit_bytes.values()) > 0.5 * sum(proxy.num_prompt_bytes.values())


async def test_a_task_group_is_placed_on_one_target() -> None:
    holds = [Hold() for _ in range(4)]

    def play(request: Received) -> AnyAnswer:
        number = int(json.loads(request.body)["messages"][0]["content"][-1])
        return Answer([holds[number], b"{}"])

    async with routed_fakes(play, play) as route, open_task_group() as group:
        headers = {"x-agentflow-program": "p", "x-agentflow-group": "g"}
        for number in range(4):
            group.start_soon(route.chat, f"{'an essay to judge ' * 1_000} {number}", headers)
        for hold in holds:
            await hold.reached.wait()
        assert sorted(len(route.asked(number)) for number in (0, 1)) == [0, 4]
        for hold in holds:
            hold.go_on()


async def test_no_member_of_a_task_group_waits_for_a_placement_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(TextRouter, "place", fail)
    statuses = []
    async with routed_fakes(unexpected) as route:

        async def ask() -> None:
            statuses.append((await route.chat(headers={"x-agentflow-group": "g"})).status_code)

        async with open_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
        assert sorted(statuses) in ([500, 500, 500], [500, 500, 503], [500, 503, 503])  # as they came
        assert route.gateway.targets[0].num_running == 0


async def test_stored_things_are_found_where_they_are() -> None:
    def storing(name: str) -> Play:
        def play(request: Received) -> AnyAnswer:
            if request.method == "POST":
                event = json.dumps({"type": "response.created", "response": {"id": f"resp_{name}1"}})
                return Answer([f"data: {event}\n\n".encode()], content_type=EVENTS)
            return json_answer({"from": name}) if name in request.path else refused(404)

        return play

    async with routed_fakes(storing("left"), storing("right")) as route:
        for number, name in enumerate(("left", "right")):
            other = route.gateway.targets[1 - number]
            other.busy_until_s[""] = 1e12
            await route.http.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
            other.busy_until_s.clear()
            got = await route.http.get(f"/v1/responses/resp_{name}1/input_items")
            assert got.json() == {"from": name}
            body = {"model": "m", "input": "y", "previous_response_id": f"resp_{name}1"}
            got = await route.http.post("/v1/responses", json=body)
            assert got.headers["x-agentflow-target"] == str(number)
        assert route.gateway.proxy.retries == {}
        # The gateway was restarted: the targets are asked in turn.
        route.gateway.placement._owners.clear()
        for name in ("left", "right"):
            assert (await route.http.delete(f"/v1/responses/resp_{name}1")).json() == {"from": name}
        assert (await route.http.get("/v1/responses/resp_none1")).status_code == 404
        # The owner is down: others do not have it.
        route.gateway.placement.own("resp_left1", route.gateway.targets[0])
        await route.gateway.targets[0].check(_Gone(), None)
        got = await route.http.get("/v1/responses/resp_left1")
        assert (got.status_code, got.json()["error"]["code"]) == (503, "no_target")


async def test_a_stored_thing_is_found_at_the_last_of_many_targets() -> None:
    async with routed_fakes(*[always(refused(404))] * 5, always(json_answer({"id": "file-1"}))) as route:
        for number in range(5):
            route.gateway.targets[number].num_websockets = -5  # asked first
        assert (await route.http.get("/v1/files/file-1")).status_code == 200
        assert sum(len(route.asked(number)) for number in range(6)) == 6


async def test_an_answer_that_repeats_a_clients_text_moves_nothing() -> None:
    echo = json_answer({"id": "resp_new1", "metadata": {"id": "resp_theirs1"}})
    async with routed_fakes(always(echo), unexpected) as route:
        here, other = route.gateway.targets
        route.gateway.placement.own("resp_theirs1", other)
        other.busy_until_s[""] = 1e12
        await route.http.post("/v1/responses", json={"model": "m", "input": "x"})
        placement = route.gateway.placement
        assert [placement.owner([f"resp_{name}1"]) for name in ("new", "theirs")] == [here, other]


async def test_small_bodies_are_read_while_large_ones_fill_the_memory() -> None:
    limits = GatewayLimits(bodies_bytes=1_000, small_body_bytes=500)
    async with routed_fakes(always(refused(503)), ok, limits=limits) as route:
        route.gateway.targets[1].num_running = 1
        route.gateway.proxy._bodies.count(1_000)
        assert (await route.chat()).status_code == 200
        assert [len(route.asked(number)) for number in range(2)] == [1, 1]  # it was sent again
        route.gateway.proxy._bodies.count(-1_000)


async def test_a_slow_client_is_no_failure_of_its_target() -> None:
    limits = GatewayLimits(body_bytes=10, small_body_bytes=0, first_byte_s=0.2)
    async with routed_fakes(ok, limits=limits) as route:
        for _ in range(3):
            async with route.sending(POST + b"99\r\n\r\n") as client:
                await client.send(b"x" * 50)
                assert (await client.receive()).startswith(b"HTTP/1.1 408 ")
        assert route.gateway.targets[0].circuit.num_failures == 0


WAIT = "/v1/programs/prog_1/variables/x"
LATE: dict[str, tuple[Answer, GatewayLimits]] = {
    "no beginning": (Answer([Hold()]), GatewayLimits(first_byte_s=0.2)),
    "no end": (Answer([b"{", Hold()]), GatewayLimits(stall_s=0.2)),
    "no further event": (Answer([b"data: 1\n\n", Hold()], content_type=EVENTS), GatewayLimits(stall_s=0.2)),
    "a proxy's time limit": (refused(504), GatewayLimits()),
}


@pytest.mark.parametrize("kind", LATE)
async def test_f37_late_answers_are_no_failures_of_their_target(kind: str) -> None:
    late, limits = LATE[kind]

    def play(request: Received) -> Answer:
        return late if request.path == WAIT else completion()

    async with routed_fakes(play, limits=limits) as route:

        async def wait() -> None:
            with suppress(httpx2.RemoteProtocolError):  # the answer is not complete
                await route.http.get(WAIT)

        async with open_task_group() as group:
            for _ in range(MAX_FAILURES):
                group.start_soon(wait)
        assert len(route.asked(0)) == MAX_FAILURES
        assert (await route.chat()).status_code == 200
        [target] = route.gateway.targets
        assert (target.circuit.num_failures, target.why_down) == (0, "")


async def test_f37_a_late_answer_of_a_trial_does_not_close_the_circuit() -> None:
    async with routed_fakes(always(refused(504))) as route:
        circuit = route.gateway.targets[0].circuit
        circuit._clock = lambda: now_s
        now_s = 0.0
        for _ in range(MAX_FAILURES):
            circuit.attempt().failed()
        assert (await route.chat()).status_code == 503
        now_s = MAX_PAUSE_S
        assert (await route.chat()).status_code == 504
        assert (circuit.status, circuit.is_ready) == ("half_open", True)


async def test_a_target_that_hangs_is_found_by_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "CHECK_TIMEOUT_S", 0.3)
    async with routed_fakes(ok, ok) as route:
        route.fakes[0]._script = always(Answer([Hold()]))
        for _ in range(MAX_FAILURES):
            await route.gateway.check_all()
        assert [target.is_up for target in route.gateway.targets] == [False, True]
        for number in range(4):
            assert (await route.chat(f"{number} " * 300)).headers["x-agentflow-target"] == "1"


async def test_f37_a_server_that_becomes_another_one_gets_no_requests() -> None:
    page = Answer(b"<html>It works!</html>", 200, {}, "text/html")
    async with routed_fakes(ok, ok) as route:
        for wrong in (page, Answer(b"", 404)):
            route.fakes[0]._script = always(wrong)
            await route.gateway.check_all()
            assert [target.is_up for target in route.gateway.targets] == [False, True]
            assert "/v1/models" in route.gateway.targets[0].why_down
            route.fakes[0]._script = always(models("m"))
            await route.gateway.check_all()
            assert [target.is_up for target in route.gateway.targets] == [True, True]


async def test_f37_a_server_that_still_loads_gets_no_requests_when_its_pause_is_over() -> None:
    now_s = [0.0]
    async with routed_fakes(ok) as route:
        [target] = route.gateway.targets
        target.circuit = Circuit(lambda: now_s[0], lambda: 1.0)
        route.fakes[0]._script = always(refused(503))
        for _ in range(2):
            await route.gateway.check_all()
            assert target.circuit.status == "open"
            now_s[0] += target.circuit.left_s
            assert target.circuit.status == "half_open"


async def test_a_check_that_is_refused_as_too_frequent_forgets_no_models() -> None:
    async with routed_fakes(ok) as route:
        route.fakes[0]._script = always(refused(429))
        await route.gateway.check_all()
        assert route.gateway.targets[0].models == {"m"}
        assert route.gateway.targets[0].is_up


async def test_a_large_body_is_passed_on_while_it_arrives() -> None:
    limits = GatewayLimits(body_bytes=10_000, bodies_bytes=15_000)

    async def pieces() -> Any:
        for number in range(50):
            yield b"%d" % (number % 10) * 1_000

    async with routed_fakes(
        always(RawAnswer([Reset()])), always(RawAnswer([Reset()])), limits=limits
    ) as route:
        got = await route.http.post("/v1/files", content=pieces())
        assert got.status_code == 502
        assert len(route.asked(0) + route.asked(1)) == 1  # it cannot be sent again
        for fake in route.fakes:
            fake._script = ok
        for headers in ({}, {"content-length": "50000"}):
            got = await route.http.post("/v1/files", content=pieces(), headers=headers)
            assert got.status_code == 200
            asked = (route.asked(0) + route.asked(1))[-1]
            assert len(asked.body) == 50_000
        assert route.gateway.proxy._bodies.num_bytes == 0


async def test_f37_a_large_body_is_sent_to_a_server_with_its_model() -> None:
    """The model is known if it stands in the part that is kept."""

    def play(name: str) -> Play:
        return lambda request: models(name) if request.path == "/v1/models" else completion(name)

    async with routed_fakes(ok, ok, limits=GatewayLimits(body_bytes=10_000)) as route:
        for fake, name in zip(route.fakes, "ab", strict=True):
            fake._script = play(name)
        await route.gateway.check_all()
        for name, length in itertools.product("ab", (10, 20_000, 80_000)):
            body = {"model": name, "messages": [{"role": "user", "content": "ü" * length}]}
            for _ in range(3):
                got = await route.http.post(CHAT, content=json.dumps(body, ensure_ascii=False).encode())
                assert got.json()["choices"][0]["message"]["content"] == name


async def test_a_client_that_stops_within_its_body() -> None:
    async with routed_fakes(unexpected, limits=GatewayLimits(body_timeout_s=0.2)) as route:
        async with route.sending(POST + b"9\r\n\r\n{") as client:
            got = await client.receive()
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in got


async def test_a_client_that_does_not_read_stops_its_server_and_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "WRITE_WATCH_S", 0.1)
    endless = Answer([Forever(b"data: " + b"x" * 60_000 + b"\n\n")], content_type=EVENTS)
    async with routed_fakes(always(endless)) as route:
        counting = route.gateway.proxy._transport = Counting(route.gateway.proxy._transport)
        async with route.sending(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            await route.fakes[0].wait_until_gone()
        assert 0 < counting.num_bytes < 20_000_000  # the bytes in the kernel's buffers
        await route.gateway.until_idle()


class Counting(httpx2.AsyncBaseTransport):
    """Counts the bytes of answers."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self.inner = inner
        self.num_bytes = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self.inner.handle_async_request(request)
        response.stream = _Counted(self, response.stream)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, counting: Counting, inner: Any) -> None:
        self.counting, self.inner = counting, inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self.inner:
            self.counting.num_bytes += len(part)
            yield part

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_a_gateway_before_itself() -> None:
    async with routed_fakes(ok) as route:
        via = {"via": f"1.1 {route.gateway._name}, 1.0 other"}
        got = await route.http.post(CHAT, json={}, headers=via)
        assert (got.status_code, route.asked(0)) == (508, [])


async def test_pages_of_other_sites_are_refused() -> None:
    async with routed_fakes(ok, origins=["https://app.example"]) as route:
        assert (await route.chat(headers={"origin": "https://evil.example"})).status_code == 403
        assert (await route.chat(headers={"origin": "https://app.example"})).status_code == 200
        assert (await route.chat(headers={"origin": route.url})).status_code == 200
        assert [one.headers.get("origin") for one in route.asked(0)] == ["https://app.example", None]


async def test_health_metrics_and_draining() -> None:
    async with routed_fakes(ok, ok, admin_key="secret") as route:
        key = {"authorization": "Bearer secret"}
        first = route.fakes[0].url
        assert (await route.http.get("/gateway/targets")).status_code == 401
        for number in range(3):
            await route.chat(f"{number} " * 300)
        got = await route.http.post("/gateway/drain", json={"target": f"{first}/v1/"}, headers=key)
        assert got.json()["state"] == "draining"
        before = len(route.asked(0))
        for number in range(3):
            assert (await route.chat(f"{number}, " * 300)).headers["x-agentflow-target"] == "1"
        assert len(route.asked(0)) == before
        assert (await route.http.get("/health")).status_code == 200
        text = (await route.http.get("/metrics", headers=key)).text
        assert f'agentflow_gateway_target_up{{target="{first}"}} 0.0' in text
        assert 'agentflow_gateway_decisions_total{reason="cost"} 6.0' in text
        await route.http.post("/gateway/drain", json={"target": route.fakes[1].url}, headers=key)
        assert (await route.http.get("/health")).status_code == 503
        assert (await route.chat()).status_code == 503
        got = await route.http.post("/gateway/resume", json={"target": first}, headers=key)
        assert got.json()["state"] == "up"
        assert (await route.chat()).status_code == 200
        for body in (b"{", b'{"target": "http://x"}', b'{"target": 1}', b"a" * 5_000):
            got = await route.http.post("/gateway/drain", content=body, headers=key)
            assert got.status_code in (400, 404, 413)


async def test_the_size_of_a_cache_is_read_when_a_server_comes_back() -> None:
    async with routed_fakes(ok, ok) as route:
        assert {target.cache_tokens for target in route.gateway.targets} == {16 * 8192}
        await route.chat("first")
        first = route.gateway.targets[0]
        await first.check(_Gone(), None)
        route.fakes[0]._script = lambda request: (
            Answer(b"sglang:max_total_num_tokens 5000") if request.path == "/metrics" else models("m")
        )
        await route.gateway.check_all()
        assert first.cache_tokens == 5_000
    async with routed_fakes(ok, cache_tokens=7_000) as route:
        assert route.gateway.targets[0].cache_tokens == 7_000
        assert [one.path for one in route.fakes[0].received] == ["/v1/models"]


async def test_without_an_admin_key_there_is_no_administration() -> None:
    async with routed_fakes(ok) as route:
        assert (await route.http.get("/gateway/targets")).status_code == 404
        assert (await route.http.get("/metrics")).status_code == 200


async def test_the_page_lists_the_metrics() -> None:
    async with routed_fakes(always(refused(503)), always(refused(503))) as route:
        await route.chat()
        families = list(route.gateway.metrics.collect())
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", PAGE, flags=re.MULTILINE)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows] == [
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(family.samples[0].labels),
        )
        for family in families
    ]
