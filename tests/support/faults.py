"""What errors are about, for ``pytest.raises(…, check=has_param("stop"))``."""

from __future__ import annotations

from collections.abc import Callable

from agentflow.errors import AgentflowError


def has_param(name: str | None) -> Callable[[AgentflowError], bool]:
    """Whether an error's ``param`` is ``name``."""

    def check(error: AgentflowError) -> bool:
        return error.param == name

    return check
