"""An LM of DSPy that tells its engine what DSPy does not: what both kinds of ``AgentflowLM`` share."""

from __future__ import annotations

from typing import Any

import dspy

from dspy_agentflow.call_notes import noting
from dspy_agentflow.programs import listen
from dspy_agentflow.settings import EngineSettings


class NotedLM(dspy.LM):
    """``follow_adapter``: answers keep to the format in which the adapter reads them."""

    follow_adapter: bool

    @property
    def kwargs(self) -> dict[str, Any]:
        """DSPy looks here before an adapter writes a prompt: time to listen to what it writes."""
        listen()
        return self._kwargs

    @kwargs.setter
    def kwargs(self, told: dict[str, Any]) -> None:
        self._kwargs = told

    def __call__(self, *args: Any, messages: Any = None, **kwargs: Any) -> Any:
        """As ``dspy.LM``."""
        with noting(messages, {**self.kwargs, **kwargs}, follow_adapter=self.follow_adapter):
            return super().__call__(*args, messages=messages, **kwargs)

    async def acall(self, *args: Any, messages: Any = None, **kwargs: Any) -> Any:
        """As ``dspy.LM``."""
        with noting(messages, {**self.kwargs, **kwargs}, follow_adapter=self.follow_adapter):
            return await super().acall(*args, messages=messages, **kwargs)


def settings_of(base_url: str | None, api_key: str | None, **told: Any) -> EngineSettings:
    """What is not said is found in the environment. DSPy's users may say ``api_base``, too."""
    said: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    return EngineSettings(**{name: value for name, value in said.items() if value}, **told)
