"""An LM of DSPy that tells its engine what DSPy does not: what both kinds of ``AgentflowLM`` share."""

from __future__ import annotations

from typing import Any

import dspy

from dspy_agentflow.call_notes import noting
from dspy_agentflow.programs import listen
from dspy_agentflow.settings import DEFAULT_MAX_TOKENS, EngineSettings, name_of


class NotedLM(dspy.LM):
    """``follow_adapter``: answers keep to the format in which the adapter reads them."""

    follow_adapter: bool

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        backend: Any = None,
        timeout: float | None = None,
        cache_salt: str = "",
        follow_adapter: bool = True,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("model_type", "chat") != "chat":
            raise ValueError(f"model_type must be 'chat', not {kwargs['model_type']!r}")
        settings = _settings_of(
            base_url or kwargs.pop("api_base", None),
            api_key,
            timeout=timeout,
            cache_salt=cache_salt,
            backend=backend,
        )
        self.follow_adapter = follow_adapter
        if backend is not None:  # nothing that DSPy's cache goes by tells one from another
            kwargs.setdefault("cache", False)
        super().__init__(name_of(model), max_tokens=max_tokens, **self._begin(settings), **kwargs)

    def _begin(self, settings: EngineSettings) -> dict[str, Any]:
        """What ``dspy.LM`` is given of them in this version."""
        raise NotImplementedError

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


def _settings_of(base_url: str | None, api_key: str | None, **told: Any) -> EngineSettings:
    """What is not said is found in the environment. DSPy's users may say ``api_base``, too."""
    said: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    return EngineSettings(**{name: value for name, value in said.items() if value}, **told)
