"""OpenTelemetry spans of sessions, runs, forks and gens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from support.apis import openai_answers
from support.apis.fake_server import Answer, fake_server
from support.programs import ask, echo
from support.spans import Recorded, recording_spans

import agentflow as af
from agentflow.language.observing.spans import CAPTURE_CONTENT

pytestmark = pytest.mark.anyio


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording_spans() as found:
        yield found


@af.program
async def judge(s: af.State, essay: str) -> str:
    s += af.user(f"Judge this essay: {essay}")
    async with s.fork(2) as branches:
        for branch, dimension in zip(branches, ["clarity", "evidence"], strict=True):
            branch += af.user(f"Judge its {dimension}.")
            branch += af.assistant(af.gen("judgment", max_tokens=64, temperature=0.5, stop="."))
    s += af.user(*branches.variables("judgment"), "Grade it.")
    s += af.assistant(af.select("grade", ["A", "B"]))
    return await s["grade"]


SCRIPT = {"judgment": "It is short", "grade": "A", "x": "green"}
JUDGED = (
    "invoke_workflow judge",
    [("fork 2", ["chat scripted", "chat scripted"]), "chat scripted"],
)


async def test_a_program_with_a_fork_gives_this_tree(recorded: Recorded):
    async with af.session(backend=af.Scripted(SCRIPT)) as flow:
        assert await flow.run(judge, "On leaves.") == "A"
    assert recorded.tree() == [("agentflow session", [JUDGED])]
    for span in recorded.spans:
        assert span.status.status_code is StatusCode.UNSET
        parent = next((s for s in recorded.spans if span.parent and s.context == span.parent), None)
        if parent is not None:
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time


async def test_gens_have_the_attributes_of_the_conventions(recorded: Recorded):
    async with af.session(backend=af.Scripted(SCRIPT), seed=7) as flow:
        await flow.run(judge, "On leaves.")
    first, second, select = recorded.named("chat scripted")
    assert first.attributes is not None
    assert select.attributes is not None
    attributes = dict(first.attributes)
    seed = attributes.pop("gen_ai.request.seed")
    assert isinstance(seed, int)
    usage = {name: attributes.pop(f"gen_ai.usage.{name}") for name in ("input_tokens", "output_tokens")}
    assert usage["output_tokens"] == 3
    assert usage["input_tokens"] > 5
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentflow",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": (".",),
        "gen_ai.output.type": "text",
        "gen_ai.response.finish_reasons": ("eos",),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "agentflow.variable": "judgment",
        "agentflow.state": "0",
    }
    assert second.attributes["agentflow.state"] == "1"
    assert first.kind is trace.SpanKind.CLIENT
    assert select.attributes["agentflow.choices"] == 2
    assert select.attributes["gen_ai.response.finish_reasons"] == ("choice",)
    (run,) = recorded.named("invoke_workflow")
    assert run.attributes["gen_ai.workflow.name"] == "judge"


async def test_a_span_has_the_model_that_answered_and_those_that_did_not(recorded: Recorded):
    async with (
        fake_server([Answer(b"{}", 529)]) as first,
        fake_server([openai_answers.text_stream("Yes")]) as second,
    ):
        backends = [
            af.OpenAI(f"m{number}", base_url=f"{server.url}/v1", api_key="k")
            for number, server in enumerate((first, second))
        ]
        async with af.session(backend=af.Fallback(*backends)) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await s["x"]
    (span,) = recorded.named("chat")
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "m0"
    assert span.attributes["gen_ai.response.model"] == "m1"
    (event,) = span.events
    assert event.attributes is not None
    assert dict(event.attributes) == {"gen_ai.request.model": "m0", "error.type": "overloaded"}


async def test_content_is_in_spans_only_where_it_is_allowed(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
):
    async with af.session(backend=af.Scripted(SCRIPT)) as flow:
        await flow.run(judge, "On leaves.")
    assert not any("leaves" in str(span.attributes) for span in recorded.spans)
    recorded.exporter.clear()
    monkeypatch.setenv(CAPTURE_CONTENT, "true")
    async with af.session(backend=af.Scripted(SCRIPT)) as flow:
        await flow.run(judge, "On leaves.")
        async with flow.state() as s:
            s += "Plants are " + af.gen("x")
            await s
    *_, select, plain = recorded.named("chat") + recorded.named("text_completion")

    def texts(span: trace.Span, which: str) -> list[tuple[str, str]]:
        found = json.loads(span.attributes[f"gen_ai.{which}.messages"])
        return [(m["role"], "".join(part["content"] for part in m["parts"])) for m in found]

    assert texts(select, "input") == [
        ("user", "Judge this essay: On leaves."),
        ("user", "It is shortIt is shortGrade it."),
        ("assistant", ""),
    ]
    assert texts(select, "output") == [("assistant", "A")]
    assert texts(plain, "input") == [("user", "Plants are ")]
    assert plain.attributes["gen_ai.operation.name"] == "text_completion"


async def test_errors_are_recorded(recorded: Recorded):
    async with af.session(backend=af.Scripted(echo)) as flow:
        with pytest.raises(af.errors.EngineFailed):
            await flow.run(ask, "a!")

        async def broken(s: af.State) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await flow.run(broken)
    (gen,) = recorded.named("text_completion")
    failed, faulty = recorded.named("invoke_workflow")
    for span, kind in ((gen, "engine_failed"), (failed, "engine_failed"), (faulty, "ZeroDivisionError")):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == kind
        assert [event.name for event in span.events] == ["exception"]
    (session,) = recorded.named("agentflow session")
    assert session.status.status_code is StatusCode.UNSET


async def test_a_cancellation_is_no_error(recorded: Recorded):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        s.cancel()
    (gen,) = recorded.named("text_completion")
    assert gen.status.status_code is StatusCode.UNSET
    assert gen.attributes["agentflow.cancelled"] is True


async def test_spans_of_the_program_are_between(recorded: Recorded):
    tracer = trace.get_tracer("test")

    async def program(s: af.State) -> None:
        with tracer.start_as_current_span("step"):
            s += "a" + af.gen("x")
            with tracer.start_as_current_span("tool"):
                await s["x"]
        s += "b" + af.gen("y")

    with tracer.start_as_current_span("lifespan"):
        async with af.session(backend=af.Scripted(echo)) as flow:
            with tracer.start_as_current_span("request"):
                await flow.run(program)
            await flow.run(ask, "a")
    gen = "text_completion scripted"
    assert recorded.tree() == [
        (
            "lifespan",
            [
                ("agentflow session", [("invoke_workflow ask", [gen])]),
                ("request", [("invoke_workflow program", [("step", [gen, "tool"]), gen])]),
            ],
        )
    ]
    (of_request, _) = recorded.named("invoke_workflow")
    (session,) = recorded.named("agentflow session")
    assert [link.context for link in of_request.links] == [session.context]


async def test_maps_streams_graphs_and_states_have_spans(recorded: Recorded):
    async with af.session(backend=af.Scripted(echo)) as flow:
        await flow.map(ask, ["a", "b"])
        assert [event async for event in flow.stream(ask, "c")][-1] == af.RunDone("<c>")
        await flow.submit(ask.trace(mark=""), {"question": "d"})
        s = flow.state(program="chat")
        s += "e" + af.gen("x")
        await s
    gen = "text_completion scripted"
    asked = ("invoke_workflow ask", [gen])
    inner = [asked, asked, asked, "invoke_workflow ask", ("invoke_workflow chat", [gen])]
    assert recorded.tree() == [("agentflow session", inner)]


async def test_tool_calls_have_spans(recorded: Recorded, monkeypatch):
    monkeypatch.setenv(CAPTURE_CONTENT, "true")
    started = anyio.Event()

    def search(query: str) -> str:
        """Finds books."""
        with trace.get_tracer("http").start_as_current_span("GET"):
            return f"a book on {query}"

    async def fail() -> None:
        raise LookupError("no such book")

    async def wait() -> None:
        started.set()
        await anyio.sleep_forever()

    search_call = af.ToolCall("search", {"query": "leaves"})
    unknown = af.ToolCall("unknown", {})
    script = [(search_call, unknown), af.ToolCall("fail", {}), "done", af.ToolCall("wait", {})]
    async with af.session(backend=af.Scripted({"answer": script})) as flow, flow.state() as s:
        s += af.user("?")
        assert await af.act(s, tools=[search, fail]) == "done"
        s += af.user("?")
        async with af.act(s, tools=[wait]):
            await started.wait()
    chat = "chat scripted"
    inner = [chat, ("execute_tool search", ["GET"]), chat, "execute_tool fail", chat]
    inner += [chat, "execute_tool wait"]
    assert recorded.tree() == [("agentflow session", [("invoke_workflow state", inner)])]
    (found,) = recorded.named("execute_tool search")
    assert dict(found.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "Finds books.",
        "gen_ai.tool.call.id": found.attributes["gen_ai.tool.call.id"],
        "gen_ai.tool.call.arguments": '{"query": "leaves"}',
        "gen_ai.tool.call.result": "a book on leaves",
    }
    (failed,) = recorded.named("execute_tool fail")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "LookupError"
    (cancelled,) = recorded.named("execute_tool wait")
    assert cancelled.attributes["agentflow.cancelled"]
    assert cancelled.status.status_code is StatusCode.UNSET


async def test_a_session_that_cannot_open_is_an_error(recorded: Recorded):
    with pytest.raises(af.errors.ServerUnreachable):
        async with af.session("ws://127.0.0.1:1"):
            pass
    (session,) = recorded.spans
    assert session.status.status_code is StatusCode.ERROR


async def test_a_recording_with_spans_replays_without_them(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with recording_spans():
        async with af.session(backend=af.Scripted(SCRIPT), record=path) as flow:
            await flow.run(judge, "On leaves.")
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(judge, "On leaves.") == "A"


async def test_without_a_provider_there_are_no_spans():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        assert await s["x"] == "<a>"
        assert flow._link.spans is None
        assert s._node.span is None


def test_without_a_provider_nothing_is_imported():
    script = (
        "import sys, anyio, agentflow as af\n"
        "async def main():\n"
        "    async with af.session(backend=af.Scripted(['a'])) as flow, flow.state() as s:\n"
        "        s += af.gen('x')\n"
        "        await s\n"
        "anyio.run(main)\n"
        "print([name for name in ('opentelemetry', 'IPython') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (child.stdout, child.stderr) == ("[]\n", "")


async def test_many_runs_at_once_keep_their_own_parents(recorded: Recorded):
    async with af.session(backend=af.Scripted(echo)) as flow, anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(flow.run, ask, str(number))
    for gen in recorded.named("text_completion"):
        (run,) = [span for span in recorded.spans if gen.parent and span.context == gen.parent]
        assert run.name == "invoke_workflow ask"
    parents = [gen.parent.span_id for gen in recorded.named("text_completion") if gen.parent]
    assert len(set(parents)) == 20
