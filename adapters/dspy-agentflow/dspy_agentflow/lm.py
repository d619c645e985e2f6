"""``AgentflowLM`` for DSPy from 3.4 on."""

from __future__ import annotations

from typing import Any, Self

from dspy.clients.base_lm import LM_CLASS_STATE_KEY

from dspy_agentflow.engines import AgentflowEngine, AsyncAgentflowEngine
from dspy_agentflow.noted_lm import NotedLM, settings_of
from dspy_agentflow.settings import DEFAULT_MAX_TOKENS, name_of


class AgentflowLM(NotedLM):
    """A ``dspy.LM`` that agentflow runs, in this process or on a server.

    >>> dspy.configure(lm=AgentflowLM())  # smollm2-135m in this process
    >>> dspy.configure(lm=AgentflowLM("smollm2-135m", base_url="ws://127.0.0.1:8410", temperature=0.7))
    >>> dspy.ChainOfThought("question -> answer")(question="What do plants do?").answer

    ``model``, ``base_url``, ``api_key``, ``backend``, ``timeout`` and ``cache_salt`` are as
    ``EngineSettings`` has them; the others are those of ``dspy.LM``. Where nothing is said, the model is the
    server's first one, or ``smollm2-135m``; ``temperature`` is 0, ``max_tokens`` 1024. ``follow_adapter``:
    answers keep to the format in which ``dspy.ChatAdapter`` or ``dspy.JSONAdapter`` reads them; one that
    ``max_tokens`` cuts off is brought to its end, with short values of the fields that are missing.
    """

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
        settings = settings_of(
            base_url or kwargs.pop("api_base", None),
            api_key,
            timeout=timeout,
            cache_salt=cache_salt,
            backend=backend,
        )
        self.follow_adapter = follow_adapter
        if backend is not None:  # nothing that DSPy's cache goes by tells one from another
            kwargs.setdefault("cache", False)
        super().__init__(
            name_of(model),
            engine=AgentflowEngine(settings),
            async_engine=AsyncAgentflowEngine(settings),
            max_tokens=max_tokens,
            **kwargs,
        )

    def dump_state(self) -> dict[str, Any]:
        """What ``load_state`` makes this LM of again, without the key."""
        state: dict[str, Any] = super().dump_state()
        engine = state.pop("engine")
        del state["async_engine"]
        return {**state, **engine["state"], "follow_adapter": self.follow_adapter}

    @classmethod
    def load_state(cls, state: dict[str, Any], *, allow_custom_lm_class: bool = False) -> Self:
        """What ``dump_state`` told. A program that holds this LM is loaded with
        ``allow_unsafe_lm_state=True``."""
        return cls(**{name: value for name, value in state.items() if name != LM_CLASS_STATE_KEY})
