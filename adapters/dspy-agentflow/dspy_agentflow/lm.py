"""``AgentflowLM`` for DSPy from 3.4 on."""

from __future__ import annotations

from typing import Any, Self

from dspy.clients.base_lm import LM_CLASS_STATE_KEY

from dspy_agentflow.engines import AgentflowEngine, AsyncAgentflowEngine
from dspy_agentflow.noted_lm import NotedLM
from dspy_agentflow.settings import EngineSettings


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

    def _begin(self, settings: EngineSettings) -> dict[str, Any]:
        return {"engine": AgentflowEngine(settings), "async_engine": AsyncAgentflowEngine(settings)}

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
