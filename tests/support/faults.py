"""Checks of an error's param: ``pytest.raises(BadArgument, check=has_param("stop"))``."""

from __future__ import annotations

from dataclasses import dataclass

from agentflow.errors import AgentflowError


@dataclass(frozen=True)
class has_param:
    """Whether an error's ``param`` is ``name``."""

    name: str | None

    def __call__(self, error: AgentflowError) -> bool:
        return error.param == self.name
