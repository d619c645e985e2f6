"""The signature and the settings of ``AgentflowLM``, the same for every version of DSPy.

The class itself is in ``engines.py`` for DSPy 3.4 and later, and in ``older_lm.py`` for DSPy 3.0 to 3.3.
Both inherit their ``__init__`` from here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Final, Self

import dspy

from agentflow.integrations import ModelConnection, cache_key, connection_through, connection_to
from dspy_agentflow.call_notes import WIRED_CALL, noting
from dspy_agentflow.programs import register_callback

PREFIX: Final = "agentflow/"
DEFAULT_NAME: Final = "default"
"""The name after the prefix for the server's first model, or ``smollm2-135m`` in this process."""
DEFAULT_MAX_TOKENS: Final = 1024
CACHE_SCOPE: Final = "agentflow_cache_scope "
"""Begins the name of an argument for the keys of DSPy's cache: the server or backend, and whether answers
follow the adapter. Without it, equal prompts to models of the same name share answers, since DSPy ignores
addresses. Its value is None, which DSPy sends to no engine."""


@dataclass(frozen=True)
class EngineSettings:
    """Where the model runs, and limits for its calls.

    ``base_url``: ``ws://…`` or ``wss://…``, default ``AGENTFLOW_URL``; without either, the model runs in this
    process. ``api_key``: the server's, default ``AGENTFLOW_API_KEY``. ``timeout``: seconds for one answer,
    from when it is scheduled. ``cache_salt``: only prompts with the same salt share cached KV. ``backend``:
    an agentflow backend instead of a server or local model; for tests, ``af.Scripted``.
    """

    base_url: str | None = field(default_factory=lambda: os.environ.get("AGENTFLOW_URL") or None)
    api_key: str | None = field(
        default_factory=lambda: os.environ.get("AGENTFLOW_API_KEY") or None, repr=False
    )
    timeout: float | None = None
    cache_salt: str = ""
    backend: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        own = None if self.backend is None else connection_through(self.backend)
        object.__setattr__(self, "_own_connection", own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable, and a copied program uses the same model

    def connection(self, model: str) -> ModelConnection:
        """Returns the connection to a model by its name in DSPy. It opens with the first call."""
        own: ModelConnection | None = getattr(self, "_own_connection", None)
        if own is not None:
            return own
        name = model.removeprefix(PREFIX)
        return connection_to(self.base_url, None if name == DEFAULT_NAME else name, self.api_key)

    def dump(self) -> dict[str, Any]:
        """Returns the settings to save, without secrets. Raises ``TypeError`` if there is a ``backend``."""
        if self.backend is not None:
            raise TypeError("an LM with a backend cannot be saved: set the LM again after loading")
        return {"base_url": self.base_url, "timeout": self.timeout, "cache_salt": self.cache_salt}


def is_cache_scope(name: str) -> bool:
    """Whether an argument is only for the keys of DSPy's cache."""
    return name.startswith(CACHE_SCOPE)


def name_of(model: str | None) -> str:
    """Returns a model's name in DSPy, which has a prefix."""
    return PREFIX + (model or DEFAULT_NAME).removeprefix(PREFIX)


class BaseAgentflowLM(dspy.LM):
    """A ``dspy.LM`` that runs in this process or on an agentflow server.

    >>> dspy.configure(lm=AgentflowLM())  # smollm2-135m in this process
    >>> dspy.configure(lm=AgentflowLM("smollm2-135m", base_url="ws://127.0.0.1:8410", temperature=0.7))
    >>> dspy.ChainOfThought("question -> answer")(question="What do plants do?").answer

    ``model``: default: the server's first model, or ``smollm2-135m`` in this process. ``base_url``,
    ``api_key``, ``backend``, ``timeout`` and ``cache_salt`` are fields of ``EngineSettings``.
    ``follow_adapter``: constrain answers to the format that ``dspy.ChatAdapter`` or ``dspy.JSONAdapter``
    parses, and complete an answer that ``max_tokens`` truncates, with short values for the missing fields.
    The other arguments are the same as of ``dspy.LM``; the defaults are ``temperature`` 0 and ``max_tokens``
    1024.
    """

    follow_adapter: bool
    _kwargs: dict[str, Any]

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
        self._source = settings.base_url if backend is None else cache_key(backend)
        if backend is not None and not hasattr(backend, "source"):  # nothing is found after this process
            kwargs.setdefault("cache", False)
        super().__init__(name_of(model), max_tokens=max_tokens, **self._engine_options(settings), **kwargs)

    def _engine_options(self, settings: EngineSettings) -> dict[str, Any]:
        """Returns the arguments of ``dspy.LM`` for these settings, in this version of DSPy."""
        raise NotImplementedError

    @property
    def kwargs(self) -> dict[str, Any]:
        """DSPy reads this before an adapter formats a prompt, so the callback is registered here. The keys of
        DSPy's cache have these arguments, and so the scope too, also after ``copy(follow_adapter=…)``."""
        register_callback()
        scope = self._cache_scope()
        if scope.keys() != {name for name in self._kwargs if is_cache_scope(name)}:
            # Replaced, because another thread may iterate it.
            others = {name: value for name, value in self._kwargs.items() if not is_cache_scope(name)}
            self._kwargs = {**others, **scope}
        return self._kwargs

    @kwargs.setter
    def kwargs(self, kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs

    def _cache_scope(self) -> dict[str, None]:
        """Returns the argument for the keys of DSPy's cache; none for a model of this process."""
        if self._source is None and self.follow_adapter:
            return {}
        return {CACHE_SCOPE + json.dumps([self._source, self.follow_adapter]): None}

    def _in_scope(self, request: Any) -> Any:
        """Returns a request of ``dspy.lm15`` with the scope, and other values unchanged."""
        return request

    def __call__(self, *args: Any, messages: Any = None, **kwargs: Any) -> Any:
        """As ``dspy.LM``."""
        args, kwargs = self._scoped(args, kwargs)
        with noting(messages, {**self.kwargs, **kwargs}, follow_adapter=self.follow_adapter):
            return super().__call__(*args, messages=messages, **kwargs)

    async def acall(self, *args: Any, messages: Any = None, **kwargs: Any) -> Any:
        """As ``dspy.LM``."""
        args, kwargs = self._scoped(args, kwargs)
        with noting(messages, {**self.kwargs, **kwargs}, follow_adapter=self.follow_adapter):
            return await super().acall(*args, messages=messages, **kwargs)

    def _scoped(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._in_scope, args)), {name: self._in_scope(one) for name, one in kwargs.items()}

    def update_history(self, entry: Any) -> None:
        """As ``dspy.LM``."""
        wired_call = WIRED_CALL.get()
        super().update_history(entry if wired_call is None else wired_call.shown(entry))


def _settings_of(base_url: str | None, api_key: str | None, **told: Any) -> EngineSettings:
    """Empty arguments leave the defaults, which come from the environment."""
    said: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    return EngineSettings(**{name: value for name, value in said.items() if value}, **told)
