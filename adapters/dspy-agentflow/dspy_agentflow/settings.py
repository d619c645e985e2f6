"""What an LM is told of where its model is; from it comes the connection."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final, Self

from agentflow.integrations.client import ModelConnection, connection_through, connection_to

PREFIX: Final = "agentflow/"
DEFAULT_NAME: Final = "default"
"""After the prefix: whichever model the server has first, or ``smollm2-135m``."""
DEFAULT_MAX_TOKENS: Final = 1024


@dataclass(frozen=True)
class EngineSettings:
    """``base_url``: ``ws://…`` or ``wss://…``; without one (and no ``AGENTFLOW_URL``) the model runs in this
    process. ``api_key``: the server's (``AGENTFLOW_API_KEY``). ``timeout``: seconds for one answer, from when
    the model gets to it. ``cache_salt``: prompts share cached KV only under an equal one. ``backend``: any
    backend of agentflow's instead, ``af.Scripted`` for tests."""

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
        return self  # it never changes, and a copied program talks to the same model

    def connection(self, model: str) -> ModelConnection:
        """To the model of this name, as DSPy has it; opened with the first call."""
        own: ModelConnection | None = getattr(self, "_own_connection", None)
        if own is not None:
            return own
        name = model.removeprefix(PREFIX)
        return connection_to(self.base_url, None if name == DEFAULT_NAME else name, self.api_key)

    def dump(self) -> dict[str, Any]:
        """Without secrets. ``TypeError`` where there is what cannot be saved."""
        if self.backend is not None:
            raise TypeError("an LM with a backend of its own cannot be saved: set the LM again after loading")
        return {"base_url": self.base_url, "timeout": self.timeout, "cache_salt": self.cache_salt}


def name_of(model: str | None) -> str:
    """As DSPy has it, with the prefix."""
    return PREFIX + (model or DEFAULT_NAME).removeprefix(PREFIX)
