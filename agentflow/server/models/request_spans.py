"""OpenTelemetry spans of the requests to an engine.

::

    server.request            below the client's span, if the client sent a ``traceparent``
    ├── queue                 until the request is in a batch
    ├── prefill               until its first token
    └── decode                until its end

They are recorded in the server's process, from messages that the engine sends anyway, so that they include
restarts of the engine. Without a tracer provider there is no observer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentflow.engine.messages import Failed, Finished, FromEngine, Progress, Started
from agentflow.engine.request import Submit
from agentflow.runtime.telemetry import configured_tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


@dataclass(slots=True)
class _Pending:
    span: Span
    phase: Span
    name: str


class RequestSpans:
    """A ``RequestObserver`` of the engine that serves ``model``."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._pending: dict[int, _Pending] = {}

    def sent(self, submit: Submit) -> None:
        """Begins the spans of a request that generates, scores, or belongs to a trace."""
        trace = submit.origin.trace
        is_asked = trace or submit.params is not None or submit.choices or submit.score_from
        if not is_asked or submit.request_id in self._pending:
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "agentflow",
            "gen_ai.request.model": self._model,
            "agentflow.tenant": submit.origin.tenant,
            "agentflow.prompt_tokens": len(submit.token_ids),
        }
        outer = TraceContextTextMapPropagator().extract({"traceparent": trace})
        span = self._tracer.start_span("server.request", outer, kind=SpanKind.SERVER, attributes=attributes)
        self._pending[submit.request_id] = _Pending(span, self._phase(span, "queue"), "queue")

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Begins and ends phases."""
        if not self._pending:
            return
        for message in messages:
            match message:
                case Started():
                    for request_id in message.request_ids:
                        self._next(request_id, "queue", "prefill")
                case Progress():
                    self._next(message.request_id, "prefill", "decode")
                case Finished():
                    self._finish(message)
                case Failed():
                    self._fail(message)

    def _phase(self, span: Span, name: str) -> Span:
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(name, set_span_in_context(span))

    def _next(self, request_id: int, before: str, after: str) -> None:
        """Begins the next phase. A preempted request that runs again stays in its phase."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.name == before:
            pending.phase.end()
            pending.phase, pending.name = self._phase(pending.span, after), after

    def _finish(self, end: Finished) -> None:
        pending = self._pending.pop(end.request_id, None)
        if pending is None:
            return
        pending.phase.end()
        pending.span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [end.finish_reason],
                "gen_ai.usage.input_tokens": end.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
                "gen_ai.usage.output_tokens": end.output_tokens,
            }
        )
        if end.miss_reason:
            pending.span.set_attribute("agentflow.miss_reason", end.miss_reason)
        pending.span.end()

    def _fail(self, failure: Failed) -> None:
        pending = self._pending.pop(failure.request_id, None)
        if pending is None:
            return
        from opentelemetry.trace import Status, StatusCode

        pending.phase.end()
        pending.span.set_attribute("error.type", failure.code)
        pending.span.set_status(Status(StatusCode.ERROR, failure.message))
        pending.span.end()


def request_spans(model: str) -> RequestSpans | None:
    """An observer for the engine of ``model``; None if the process has configured no tracer provider."""
    tracer = configured_tracer()
    return None if tracer is None else RequestSpans(tracer, model)
