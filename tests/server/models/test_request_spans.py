"""Spans of a server's requests, below their clients' spans."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.to_thread
import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from support.api_server import ApiServer, api_server
from support.server.http_clients import only_asyncio
from support.spans import Recorded, recording_spans

import agentflow as af
from agentflow.protocol import ops
from agentflow.protocol.op_table import check_received_op
from agentflow.protocol.sampling import GenParams

PHASES = ("server.request", ["queue", "prefill", "decode"])
SELECT = ("server.request", ["queue", "prefill"])


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording_spans() as found:
        yield found


@pytest.fixture
def server(recorded: Recorded) -> Iterator[ApiServer]:
    with api_server(constraints=False) as running:
        yield running


@af.program
async def judge(s: af.State, essay: str) -> str:
    s += af.user(essay)
    async with s.fork(2) as branches:
        for branch in branches:
            branch += af.assistant(af.gen("judgment", max_tokens=4, ignore_eos=True))
    s += af.user(*branches.variables("judgment"))
    s += af.assistant(af.select("grade", ["A", "B"]))
    return await s["grade"]


@pytest.mark.anyio
async def test_the_spans_of_a_session_go_on_in_the_server(recorded: Recorded, server: ApiServer):
    with anyio.fail_after(30):
        async with af.session(server.url) as flow:
            await flow.run(judge, "On leaves.")
    gen = ("chat fake", [PHASES])
    select = ("chat fake", [SELECT])
    run = ("invoke_workflow judge", [("fork 2", [gen, gen]), select])
    assert recorded.tree() == [("agentflow session", [run])]
    for request in recorded.named("server.request"):
        assert request.kind is SpanKind.SERVER
        (client,) = [s for s in recorded.named("chat") if s.context.span_id == request.parent.span_id]
        assert client.start_time <= request.start_time <= request.end_time <= client.end_time
        phases = [span for span in recorded.spans if span.parent == request.context]
        assert phases[0].start_time >= request.start_time
        assert phases[-1].end_time <= request.end_time
    first = recorded.named("server.request")[0].attributes
    assert first["gen_ai.usage.output_tokens"] == 4
    assert first["gen_ai.request.model"] == "fake"


@pytest.mark.anyio
async def test_the_spans_of_a_graph_go_on_in_the_server(recorded: Recorded, server: ApiServer):
    with anyio.fail_after(30):
        async with af.session(server.url) as flow:
            await flow.submit(judge.trace(), {"essay": "On leaves."})
    run = ("invoke_workflow judge", [PHASES, PHASES, SELECT])
    assert recorded.tree() == [("agentflow session", [run])]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_spans_of_http_clients_go_on_too(recorded: Recorded, server: ApiServer, path: str, stream: bool):
    body: dict[str, object] = {"model": "fake", "max_tokens": 4, "stream": stream}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    with trace.get_tracer("test").start_as_current_span("client"):
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)
        answer = httpx2.post(server.url + path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    (tree,) = recorded.tree()
    assert tree[0] == "client"
    assert [name for name, _ in tree[1]] == ["server.request"]


@pytest.mark.parametrize("header", [None, "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 1000])
def test_a_request_without_a_readable_trace_has_its_own(
    recorded: Recorded, server: ApiServer, header: str | None
):
    body = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    headers = {} if header is None else {"traceparent": header}
    assert httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert [name for name, _ in recorded.tree()] == ["server.request"]


@pytest.mark.parametrize(
    "op",
    [
        ops.Gen(1, 2, "x", GenParams(), trace="x" * 257),
        ops.Select(1, 2, "x", ("a", "b"), trace="x" * 257),
    ],
)
def test_a_trace_that_is_too_long_is_rejected(op: ops.Op):
    with pytest.raises(af.errors.BadArgument):
        check_received_op(op)


@pytest.mark.anyio
async def test_an_aborted_request_ends_its_spans(recorded: Recorded, server: ApiServer):
    with anyio.fail_after(30):
        async with af.session(server.url) as flow, flow.state() as s:
            s += "a" + af.gen("x", max_tokens=10_000, ignore_eos=True)
            async for _ in s["x"]:
                break
        await anyio.to_thread.run_sync(recorded.wait_for, "server.request")
    assert {span.name for span in recorded.spans} >= {"queue", "prefill", "decode"}
