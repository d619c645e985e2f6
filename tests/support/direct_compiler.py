"""Compiles constraints in this process, for tests that are not about the compiling process. To start that one
takes longer than most of them run."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.compiler import (
    LOADER,
    ConstraintCompiler,
    Outcome,
    _check_sendable,
    _of_tenant,
)
from agentflow.engine.grammar.compiler.messages import CompileFailure, CompileLimits
from agentflow.errors import AgentflowError
from agentflow.protocol.constraint import Constraint

_compiled = functools.lru_cache(256)(compile_constraint)  # many tests have the same tools


class _DirectCompiler(ConstraintCompiler):
    async def _wait_for(self, constraint: Constraint, tenant: str) -> Outcome:
        _check_sendable(constraint)
        outcome: Outcome
        try:
            outcome = _of_tenant(_compiled(constraint), tenant)
            self._num_compiled += 1
        except AgentflowError as error:
            outcome = CompileFailure(error.code, str(error), param=error.param)
        self._cache.put(tenant, constraint, outcome)
        return outcome


@asynccontextmanager
async def direct_compiler() -> AsyncIterator[ConstraintCompiler]:
    """``constraint_compiler`` without a process and its limits."""
    yield _DirectCompiler(CompileLimits(), LOADER)
