"""Support for OpenTelemetry. It is imported only if the process uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentflow.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer


def configured_tracer() -> Tracer | None:
    """The package's tracer; None if the process has configured no tracer provider."""
    # Code that configures a provider has imported the module. Only this variable makes a provider later.
    if "opentelemetry.trace" not in sys.modules and not os.environ.get("OTEL_PYTHON_TRACER_PROVIDER"):
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("agentflow", __version__)


def current_context() -> Context | None:
    """OpenTelemetry's current context, with span and baggage; None if OpenTelemetry is not used."""
    context = sys.modules.get("opentelemetry.context")
    return None if context is None else context.get_current()


@contextmanager
def attached(context: Context | None) -> Iterator[None]:
    """Makes ``context`` current in the block. None: an empty one."""
    module = sys.modules.get("opentelemetry.context")
    if module is None:
        yield
        return
    token = module.attach(module.Context() if context is None else context)
    try:
        yield
    finally:
        module.detach(token)
