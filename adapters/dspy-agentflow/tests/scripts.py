"""Scripted models for the tests: what they are asked, and answers in an adapter's format."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from dspy_agentflow import AgentflowLM

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import GenParams


def chat(**fields: Any) -> str:
    """As ``dspy.ChatAdapter`` reads it."""
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


class Recorded(ScriptedGenerator):
    """Keeps what it is asked."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.programs: list[str] = []
        self.prompts: list[str] = []
        self.params: list[GenParams] = []
        self.constraints: list[Constraint | None] = []
        self.forks: list[int] = []
        self.begun, self.ended = threading.Event(), threading.Event()

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> ScriptedContext:
        """Of a program, and under a salt."""
        self.programs.append(program)
        self.salt = cache_salt
        return super().open(cache_salt, program=program, label=label)

    async def fork(self, context: ScriptedContext, count: int) -> list[ScriptedContext]:
        """One prompt, several answers."""
        self.forks.append(count)
        return await super().fork(context, count)

    async def reply(self, context: Any, params: Any, on_text: Any, constraint: Any = None) -> Any:
        """One answer."""
        self.prompts.append(context.text)
        self.params.append(params)
        self.constraints.append(constraint)
        self.begun.set()
        try:
            return await super().reply(context, params, on_text, constraint)
        finally:
            self.ended.set()


def scripted(script: Any, **kwargs: Any) -> tuple[AgentflowLM, Recorded]:
    """An LM that answers from the script; no retries, and nothing from DSPy's cache unless asked for."""
    backend = af.Scripted(script)
    backend.generator = generator = Recorded(script)
    return AgentflowLM(backend=backend, **{"cache": False, "num_retries": 0, **kwargs}), generator


def answering(answer: str) -> Callable[[str], str]:
    """The same to all."""
    return lambda prompt: answer


def as_json(**fields: Any) -> str:
    """As ``dspy.JSONAdapter`` reads it."""
    return json.dumps(fields)


def settings_of(lm: Any) -> Any:
    """Where its model is."""
    return lm.engine_settings if hasattr(lm, "engine_settings") else lm.engine.settings
