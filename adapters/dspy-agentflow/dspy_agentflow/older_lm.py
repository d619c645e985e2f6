"""``AgentflowLM`` for DSPy 3.0 to 3.3, whose LMs are asked as OpenAI's API is."""

from __future__ import annotations

import copy
import inspect
import threading
from contextlib import aclosing, closing
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import anyio
import anyio.from_thread
import dspy

from agentflow.integrations.client import Ended, Said
from dspy_agentflow.answers import Asked, aask, ask
from dspy_agentflow.call_notes import notes
from dspy_agentflow.noted_lm import NotedLM
from dspy_agentflow.openai_requests import asked_of
from dspy_agentflow.openai_responses import PASSING, chunk_of, litellm_errors, response_of
from dspy_agentflow.settings import EngineSettings

FIRST_PAUSE_S: Final = 0.5
_PARAMS: Final = ("max_tokens", "temperature", "top_p", "stop", "n", "seed", "response_format", "tools")


class AgentflowLM(NotedLM):
    """A ``dspy.LM`` that agentflow runs, in this process or on a server; see ``AgentflowLM`` in ``lm.py``."""

    supports_function_calling = True
    supports_response_schema = True
    supports_reasoning = False
    supported_params = frozenset((*_PARAMS, "tool_choice", "parallel_tool_calls", "logprobs"))

    def _begin(self, settings: EngineSettings) -> dict[str, Any]:
        self.engine_settings = settings
        return {}

    def dump_state(self) -> dict[str, Any]:
        """What this LM is made of again, without the key. Before DSPy 3.3, what is loaded is a plain
        ``dspy.LM``: set the LM again."""
        state: dict[str, Any] = super().dump_state()
        for name in ("provider", "finetuning_model", "launch_kwargs", "train_kwargs"):
            state.pop(name, None)
        return {**state, **self.engine_settings.dump(), "follow_adapter": self.follow_adapter}

    def _get_cached_completion_fn(self, completion_fn: Any, cache: Any) -> Any:
        """Where DSPy would ask LiteLLM."""
        ours = self._acomplete if inspect.iscoroutinefunction(completion_fn) else self._complete
        return super()._get_cached_completion_fn(ours, cache)

    def _complete(self, request: dict[str, Any], num_retries: int, cache: Any = None) -> Any:
        telling = _Telling(num_retries)
        while True:
            try:
                with litellm_errors(self.model):
                    ends = [self._ends(asked, request, telling) for asked in self._asked(request)]
                return response_of(list(chain(*ends)))
            except PASSING as error:
                threading.Event().wait(telling.pause_s(error))

    def _ends(self, asked: Asked, request: dict[str, Any], telling: _Telling) -> list[Ended]:
        ends = []
        with closing(ask(self._connection(request), asked)) as events:
            for event in events:
                if isinstance(event, Ended):
                    ends.append(event)
                elif (chunk := telling.chunk(event, self.model)) is not None:
                    anyio.from_thread.run(telling.stream.send, chunk)
        return sorted(ends, key=lambda end: end.index)

    async def _acomplete(self, request: dict[str, Any], num_retries: int, cache: Any = None) -> Any:
        telling = _Telling(num_retries)
        while True:
            try:
                with litellm_errors(self.model):
                    ends = [await self._aends(asked, request, telling) for asked in self._asked(request)]
                return response_of(list(chain(*ends)))
            except PASSING as error:
                await anyio.sleep(telling.pause_s(error))  # noqa: TID251  # before the next try

    async def _aends(self, asked: Asked, request: dict[str, Any], telling: _Telling) -> list[Ended]:
        ends = []
        async with aclosing(aask(self._connection(request), asked)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    ends.append(event)
                elif (chunk := telling.chunk(event, self.model)) is not None:
                    await telling.stream.send(chunk)
        return sorted(ends, key=lambda end: end.index)

    def _asked(self, request: dict[str, Any]) -> list[Asked]:
        asked = asked_of(copy.copy(request), self.engine_settings, notes())
        is_heard = dspy.settings.send_stream is not None
        return [replace(one, is_streamed=is_heard and one.n == 1) for one in asked]

    def _connection(self, request: dict[str, Any]) -> Any:
        return self.engine_settings.connection(request["model"])


class _Telling:
    """Who listens to one call of the LM, and whether it may be tried again."""

    def __init__(self, num_retries: int) -> None:
        self.stream = dspy.settings.send_stream
        self._num_retries = num_retries
        self._pause_s = FIRST_PAUSE_S
        self._has_told = False

    def chunk(self, said: Said, model: str) -> Any:
        """What the listener is told; None where there is none, or nothing to tell."""
        if self.stream is None:
            return None
        self._has_told = True
        predict = dspy.settings.caller_predict
        return chunk_of(said, model, id(predict) if predict else None)

    def pause_s(self, error: Exception) -> float:
        """How long to wait before the next try; raises the error where there is none."""
        if self._has_told or self._num_retries <= 0:
            raise error
        self._num_retries -= 1
        pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
        return pause_s
