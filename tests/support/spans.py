"""Spans that OpenTelemetry's SDK has recorded, as a tree."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

Tree = dict[str, Any]


class Recorded(SpanProcessor):
    """The spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.provider.add_span_processor(self)
        self._one_ended = threading.Condition()

    def on_end(self, span: ReadableSpan) -> None:
        with self._one_ended:
            self._one_ended.notify_all()

    def wait_for(self, name: str) -> None:
        """Waits until a span of this name has ended, in any thread."""
        with self._one_ended:
            assert self._one_ended.wait_for(lambda: self.named(name), 30)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, beginning: str) -> list[ReadableSpan]:
        """The spans whose names have this beginning, in the order of their starts."""
        found = [span for span in self.spans if span.name.startswith(beginning)]
        return sorted(found, key=lambda span: span.start_time or 0)

    def tree(self) -> list[Any]:
        """A name for a span without children, else a pair of its name and its children, in the order of their
        starts; spans with a remote parent that did not end here are roots."""
        known = {span.context.span_id for span in self.spans}
        below: dict[int | None, list[ReadableSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_time or 0):
            parent = span.parent.span_id if span.parent is not None else None
            below.setdefault(parent if parent in known else None, []).append(span)

        def nodes(parent: int | None) -> list[Any]:
            found: list[Any] = []
            for span in below.get(parent, []):
                inner = nodes(span.context.span_id)
                found.append((span.name, inner) if inner else span.name)
            return found

        return nodes(None)


@contextmanager
def recording_spans() -> Iterator[Recorded]:
    """The process has a tracer provider during the scope. OpenTelemetry lets it be set only once."""
    recorded = Recorded()
    with patch.object(trace, "_TRACER_PROVIDER", recorded.provider):
        yield recorded
