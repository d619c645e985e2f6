"""OpenTelemetry spans of a session, in the semantic conventions for generative AI.

::

    agentflow session
    └── invoke_workflow judge        a run
        ├── fork 2
        │   ├── chat smollm2-135m    a gen or select; the server's spans come below it
        │   └── chat smollm2-135m
        ├── chat smollm2-135m        a reply of ``af.act``
        └── execute_tool weather     and the call of a tool in it

``spans_of_session`` returns None unless the process has configured a tracer provider. It then imports
nothing, and no run, state or variable has a span. A session keeps the provider that it found when it was
opened.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentflow.errors import Cancelled
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Value
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.telemetry import configured_tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable of the conventions that allows prompts and answers in spans."""
_CAPTURES = {"true", "1", "span_only", "span_and_event"}
_OP = "gen_ai.operation.name"
# The parameters that the span of a gen contains if they are given, by their names in the span.
_REPORTED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop": "stop_sequences",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}


def spans_of_session() -> SessionSpan | None:
    """Begins the span of a session; None if spans are off."""
    tracer = configured_tracer()
    return None if tracer is None else SessionSpan(tracer)


ReadPrompt = Callable[[], list[tuple[str, str]]]
"""The turns of a prompt: role and text. The role of text outside turns is empty."""


class SessionSpan:
    """The span of a session, and the data that all spans below it need. ``model``: known once the session is
    open."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.model = ""
        self.captures_content = os.environ.get(CAPTURE_CONTENT, "").strip().lower() in _CAPTURES
        self._outer = _current()
        self._span = tracer.start_span("agentflow session", attributes={"gen_ai.provider.name": "agentflow"})
        self._open: dict[RunSpan, None] = {}

    def begin_run(self, name: str) -> RunSpan:
        """The span of a run. Its parent is the caller's current span, or else the session's."""
        outer, links = _current(), []
        parent = outer
        if not outer.get_span_context().is_valid or outer is self._outer:
            parent = self._span
        else:
            links = [self._span.get_span_context()]
        run = RunSpan(self, name, parent, outer, links)
        self._open[run] = None
        return run

    def has_ended(self, run: RunSpan) -> None:
        """The run's span has ended."""
        self._open.pop(run, None)

    def is_open(self, model: str) -> None:
        """The session is open."""
        self.model = model
        self._span.set_attribute("gen_ai.request.model", model)

    def end(self, error: BaseException | None) -> None:
        """Ends the span, and the spans of runs that have not ended."""
        for run in list(self._open):
            run.end()
        if error is not None:
            _record(self._span, error)
        self._span.end()


class StateSpan:
    """The parent span of a state's gens: the span of a run or of a fork."""

    def __init__(self, session: SessionSpan, span: Span, run: RunSpan | None) -> None:
        self._session = session
        self.span = span
        self._run = run
        self.last_ns = time.time_ns()

    @property
    def traceparent(self) -> str:
        """The parent for the spans of a graph's gens, which only the server makes."""
        return _traceparent(self.span)

    @property
    def run(self) -> RunSpan:
        """The span of the run."""
        assert self._run is not None
        return self._run

    def fork(self, count: int, path: Sequence[int]) -> StateSpan:
        """The span of a fork of a state at ``path``. It ends with the run, at the time of its last gen."""
        attributes: dict[str, Any] = {"agentflow.state": _shown(path), "agentflow.branches": count}
        span = self._session.tracer.start_span(f"fork {count}", self._parent(), attributes=attributes)
        fork = StateSpan(self._session, span, self.run)
        self.run.forks.append((fork, self))
        return fork

    def gen(
        self, op: ops.Gen | ops.Select | ops.Decide, path: Sequence[int], *, in_turn: bool, prompt: ReadPrompt
    ) -> GenSpan:
        """The span of a gen, select or decide. ``prompt`` is called when it is complete."""
        operation = "chat" if in_turn else "text_completion"
        attributes: dict[str, Any] = {
            _OP: operation,
            "gen_ai.provider.name": "agentflow",
            "gen_ai.request.model": self._session.model,
            "agentflow.variable": op.name,
            "agentflow.state": _shown(path),
        }
        if isinstance(op, ops.Gen):
            attributes |= _of_params(op.params)
            is_json = op.constraint is not None and op.constraint.kind == "schema"
            attributes["gen_ai.output.type"] = "json" if is_json else "text"
        elif isinstance(op, ops.Select):
            attributes["agentflow.choices"] = len(op.choices)
        else:
            attributes["agentflow.questions"] = len(op.questions)
        span = self._start(f"{operation} {self._session.model}", attributes)
        return GenSpan(self, span, prompt if self._session.captures_content else None)

    def tool(self, name: str, call_id: str, description: str, arguments: str) -> ToolSpan:
        """The span of a tool call of ``af.act``. ``arguments``: as JSON."""
        attributes = {_OP: "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
        if call_id:
            attributes["gen_ai.tool.call.id"] = call_id
        if description:
            attributes["gen_ai.tool.description"] = description
        if self._session.captures_content:
            attributes["gen_ai.tool.call.arguments"] = arguments
        tracer = self._session.tracer
        span = tracer.start_span(f"execute_tool {name}", self._parent(), attributes=attributes)
        return ToolSpan(self, span, self._session.captures_content)

    def _parent(self) -> Any:
        """The context of a new span below this one. A span that the program has begun is in between."""
        from opentelemetry.trace import set_span_in_context

        current = _current()
        is_own = self._run is self and current.get_span_context().is_valid
        is_between = is_own and current is not self.span and current is not self.run.outer
        return set_span_in_context(current if is_between else self.span)

    def _start(self, name: str, attributes: dict[str, Any]) -> Span:
        from opentelemetry.trace import SpanKind

        return self._session.tracer.start_span(
            name, self._parent(), kind=SpanKind.CLIENT, attributes=attributes
        )


class RunSpan(StateSpan):
    """The span of a run.

    Args:
        session: The span of its session.
        name: The program's name.
        parent: The span above it.
        outer: The span that was current when it began.
        links: Related spans.
    """

    def __init__(
        self, session: SessionSpan, name: str, parent: Span, outer: Span, links: list[SpanContext]
    ) -> None:
        from opentelemetry.trace import Link, set_span_in_context

        attributes = {
            _OP: "invoke_workflow",
            "gen_ai.workflow.name": name,
            "gen_ai.request.model": session.model,
        }
        span = session.tracer.start_span(
            f"invoke_workflow {name}",
            set_span_in_context(parent),
            attributes=attributes,
            links=[Link(context) for context in links],
        )
        super().__init__(session, span, None)
        self._run = self
        self.outer = outer
        self.forks: list[tuple[StateSpan, StateSpan]] = []  # each with its parent
        self._has_ended = False

    def current(self) -> AbstractContextManager[Any]:
        """A scope in which this is the current span."""
        from opentelemetry.trace import use_span

        return use_span(self.span, record_exception=False, set_status_on_exception=False)

    def fail(self, error: BaseException) -> None:
        """The run failed."""
        if not self._has_ended:
            _record(self.span, error)

    def end(self) -> None:
        """Ends the spans of the run and its forks. May be repeated."""
        if self._has_ended:
            return
        self._has_ended = True
        for fork, outer in reversed(self.forks):  # inner forks first
            fork.span.end(fork.last_ns)
            outer.last_ns = max(outer.last_ns, fork.last_ns)
        self.span.end()
        self._session.has_ended(self)


class GenSpan:
    """The span of one gen or select. ``traceparent``: the parent of the server's spans."""

    def __init__(self, outer: StateSpan, span: Span, prompt: ReadPrompt | None) -> None:
        self._outer = outer
        self._span = span
        self._prompt = prompt
        self.traceparent = _traceparent(span)

    def complete(self, value: Value, text: str) -> None:
        """Ends the span of a value. ``text``: its text."""
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [value.finish_reason],
                "gen_ai.usage.input_tokens": value.usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": value.usage.cached_tokens,
                "gen_ai.usage.output_tokens": value.usage.output_tokens,
            }
        )
        if value.model:
            self._span.set_attribute("gen_ai.response.model", value.model)
        for one in value.passed_over:
            attributes = {"gen_ai.request.model": one.model, "error.type": one.error.code}
            self._span.add_event("agentflow.passed_over", attributes)
        if self._prompt is not None:
            answer = {**_message("assistant", text), "finish_reason": value.finish_reason}
            self._span.set_attribute("gen_ai.input.messages", _json([_message(*m) for m in self._prompt()]))
            self._span.set_attribute("gen_ai.output.messages", _json([answer]))
        self._end()

    def fail(self, error: ErrorInfo) -> None:
        """Ends the span of a failure."""
        _record(self._span, error)
        self._end()

    def _end(self) -> None:
        self._outer.last_ns = time.time_ns()
        self._span.end(self._outer.last_ns)


class ToolSpan:
    """The span of one tool call: a scope in which it is current, and at whose end it ends."""

    def __init__(self, outer: StateSpan, span: Span, captures_content: bool) -> None:
        self._outer = outer
        self._span = span
        self._captures_content = captures_content

    def __enter__(self) -> None:
        from opentelemetry.trace import use_span

        self._scope = use_span(self._span, record_exception=False, set_status_on_exception=False)
        self._scope.__enter__()

    def complete(self, text: str, failure: Exception | None) -> None:
        """The call has this result, or failed."""
        if self._captures_content:
            self._span.set_attribute("gen_ai.tool.call.result", text)
        if failure is not None:
            _record(self._span, failure)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)
        if error is not None:
            _record(self._span, error)
        self._outer.last_ns = time.time_ns()
        self._span.end(self._outer.last_ns)


def _traceparent(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _current() -> Span:
    from opentelemetry.trace import get_current_span

    return get_current_span()


def _shown(path: Sequence[int]) -> str:
    return ".".join(map(str, path)) or "root"


def _of_params(params: GenParams) -> dict[str, Any]:
    values = {name: getattr(params, field) for field, name in _REPORTED.items()}
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value not in (None, ())}


def _record(span: Span, error: BaseException | ErrorInfo) -> None:
    """Marks the span as failed. A cancellation is no failure."""
    from opentelemetry.trace import Status, StatusCode

    info = error if isinstance(error, ErrorInfo) else ErrorInfo.of(error)
    is_other = isinstance(error, BaseException) and not isinstance(error, Exception)
    if info.code == Cancelled.code or is_other:
        span.set_attribute("agentflow.cancelled", True)
        return
    if isinstance(error, BaseException):
        span.record_exception(error)
        span.set_attribute("error.type", getattr(error, "code", type(error).__qualname__))
    else:
        span.record_exception(error.to_exception())
        span.set_attribute("error.type", info.code)
    span.set_status(Status(StatusCode.ERROR, info.message))


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role or "user", "parts": [{"type": "text", "content": text}]}


def _json(messages: list[dict[str, Any]]) -> str:
    return json.dumps(messages, ensure_ascii=False)
