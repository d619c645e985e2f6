"""Asks a connection, in LangChain's exceptions, and again where a failure may pass."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any, Final

import anyio

from agentflow.integrations.client import Ended, ModelCall, ModelConnection, Said
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.programs import program_of

FIRST_PAUSE_S: Final = 0.5


class Retries:
    """Of one call: whether, and when, to try again. Not where somebody has got something of the answer:
    what is said where it ``is_streamed``, and otherwise an answer of several."""

    def __init__(self, most: int, *, is_streamed: bool = False) -> None:
        self._left = most
        self._pause_s = FIRST_PAUSE_S
        self._is_streamed = is_streamed
        self._was_heard = False

    def hear(self, event: Said | Ended) -> None:
        """It was told on."""
        self._was_heard |= self._is_streamed or isinstance(event, Ended)

    def pause_s(self, error: Exception) -> float:
        """How long to wait before the next try; raises the error where there is none."""
        if self._was_heard or not getattr(error, "is_retryable", False) or self._left <= 0:
            raise error
        self._left -= 1
        pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
        return max(pause_s, getattr(error, "retry_after_s", None) or 0.0)


def ask(
    connection: ModelConnection, call: ModelCall, run_manager: Any, retries: Retries
) -> Generator[Said | Ended, None, None]:
    """What the model says, as it comes. Blocks in between."""
    while True:
        try:
            program, objective = program_of(run_manager, connection)
            with langchain_errors(), closing(connection.ask(call, program, objective)) as events:
                for event in events:
                    retries.hear(event)
                    yield event
            return
        except Exception as error:
            threading.Event().wait(retries.pause_s(error))


async def aask(
    connection: ModelConnection, call: ModelCall, run_manager: Any, retries: Retries
) -> AsyncGenerator[Said | Ended, None]:
    """The same in an event loop."""
    while True:
        try:
            program, objective = program_of(run_manager, connection)
            with langchain_errors():
                async with aclosing(connection.aask(call, program, objective)) as events:
                    async for event in events:
                        retries.hear(event)
                        yield event
            return
        except Exception as error:
            await anyio.sleep(retries.pause_s(error))  # noqa: TID251  # before the next try
