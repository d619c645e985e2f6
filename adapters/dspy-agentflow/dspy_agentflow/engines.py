"""Engines of DSPy, from 3.4 on, that agentflow runs: one for calls that wait, one for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any, Final, Self

from dspy import lm15

from agentflow.integrations.client import Ended
from dspy_agentflow.answers import Asked, aask, ask
from dspy_agentflow.call_notes import CallNotes, notes
from dspy_agentflow.errors import engine_errors
from dspy_agentflow.programs import listen
from dspy_agentflow.requests import asked_of
from dspy_agentflow.responses import EventWriter, response_of
from dspy_agentflow.settings import EngineSettings

SUPPORTED_PARAMS: Final = frozenset(
    (
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
    )
)


class _Engine:
    supports_function_calling = True
    supports_response_schema = True
    supports_reasoning = False
    supported_params = SUPPORTED_PARAMS

    def __init__(self, settings: EngineSettings | None = None, **told: Any) -> None:
        self.settings = EngineSettings(**told) if settings is None else settings
        listen()

    def dump_state(self) -> dict[str, Any]:
        """Where the model is, without the key. ``TypeError`` where there is a backend of its own."""
        return self.settings.dump()

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> Self:
        """What ``dump_state`` told."""
        return cls(EngineSettings(**state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings!r})"

    def _asked(self, request: lm15.Request, told: CallNotes, *, is_streamed: bool = False) -> Asked:
        if not isinstance(request, lm15.Request):
            raise TypeError(f"an engine takes a dspy.lm15.Request, not {type(request).__name__}")
        return asked_of(request, self.settings, told, is_streamed=is_streamed)


class AgentflowEngine(_Engine):
    """For ``dspy.LM(model, engine=…)``; ``AgentflowLM`` brings it along. Takes the fields of
    ``EngineSettings``.

    >>> settings = EngineSettings(base_url="ws://127.0.0.1:8410")
    >>> engine, async_engine = AgentflowEngine(settings), AsyncAgentflowEngine(settings)
    >>> lm = dspy.LM("agentflow/smollm2-135m", engine=engine, async_engine=async_engine)
    """

    def complete(self, request: lm15.Request) -> lm15.Response:
        """One answer. An error of ``dspy.lm15`` where there is none."""
        told = notes()
        if told.ready:
            return told.next()
        with engine_errors():
            asked = self._asked(request, told)
            with closing(ask(self.settings.connection(request.model), asked)) as events:
                ends = [event for event in events if isinstance(event, Ended)]
        return told.give(_responses(ends))

    def stream(self, request: lm15.Request) -> Generator[Any, None, None]:
        """One answer, as it comes."""
        writer, told = EventWriter(request.model), notes()
        yield writer.start()
        with engine_errors():
            asked = self._asked(request, told, is_streamed=True)
            with closing(ask(self.settings.connection(request.model), asked)) as events:
                for event in events:
                    yield from writer.end(event) if isinstance(event, Ended) else writer.deltas(event)
        told.num_given += 1

    def close(self) -> None:
        """The process's one connection stays for others."""


class AsyncAgentflowEngine(_Engine):
    """For ``dspy.LM(model, engine=…, async_engine=…)``: the same, in the caller's event loop."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """One answer. An error of ``dspy.lm15`` where there is none."""
        told = notes()
        if told.ready:
            return told.next()
        with engine_errors():
            asked = self._asked(request, told)
            async with aclosing(aask(self.settings.connection(request.model), asked)) as events:
                ends = [event async for event in events if isinstance(event, Ended)]
        return told.give(_responses(ends))

    async def stream(self, request: lm15.Request) -> AsyncGenerator[Any, None]:
        """One answer, as it comes."""
        writer, told = EventWriter(request.model), notes()
        yield writer.start()
        with engine_errors():
            asked = self._asked(request, told, is_streamed=True)
            async with aclosing(aask(self.settings.connection(request.model), asked)) as events:
                async for event in events:
                    for delta in writer.end(event) if isinstance(event, Ended) else writer.deltas(event):
                        yield delta
        told.num_given += 1

    async def aclose(self) -> None:
        """The process's one connection stays for others."""


def _responses(ends: list[Ended]) -> list[lm15.Response]:
    return [response_of(end) for end in sorted(ends, key=lambda end: end.index)]
