"""Answers and errors of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentflow.protocol.events import ErrorInfo, Usage
from agentflow.server.compatible.error_format import OpenAIErrorFormat
from agentflow.server.errors import ApiError
from agentflow.server.programs.program import ProgramVariable, ServedProgram
from agentflow.server.programs.shared_values import KeptUsage
from agentflow.server.programs_api.types import ProgramErrorBody, VariableAnswer, VariableUsage

FAILED = 424
"""The status of a variable without a value: a request that the value depends on has failed."""
MAX_PATH = 64
"""The limit of variables in an error's path; a longer path has only its first and last variables."""


@dataclass(eq=False)
class FailedVariable(ApiError):
    """The error of a variable without a value. ``path``: the ids of the variables from the cause on."""

    path: tuple[str, ...] = ()


class ProgramErrorFormat(OpenAIErrorFormat):
    """OpenAI's format, with the path of a failure."""

    body_type: type[msgspec.Struct] = ProgramErrorBody

    def body(self, error: ApiError, request_id: str) -> bytes:
        shown = msgspec.json.decode(super().body(error, request_id), type=ProgramErrorBody)
        if isinstance(error, FailedVariable):
            shown.error.path = [*error.path]
        return msgspec.json.encode(shown)


PROGRAMS = ProgramErrorFormat()


async def failure(program: ServedProgram, variable: ProgramVariable) -> FailedVariable:
    """The error of a variable that has failed."""
    failed = await program.path_of_failure(variable)
    path = [one.id for one in failed]
    error = failed[0].record.error
    assert error is not None
    return failed_variable(variable.id, path, ErrorInfo.of(error))


def failed_variable(variable_id: str, path: Sequence[str], info: ErrorInfo) -> FailedVariable:
    """The error of a variable that has failed. ``path``: the variables from the cause to this one."""
    if len(path) > MAX_PATH:
        path = [*path[: MAX_PATH // 2], *path[-MAX_PATH // 2 :]]
    text = f"{variable_id!r} has no value"
    if len(path) > 1:
        text += f", because {path[0]!r} has none ({' → '.join(path)})"
    return FailedVariable(FAILED, info.code, f"{text}: {info.message}", path=tuple(path))


def make_variable_answer(variable: ProgramVariable) -> VariableAnswer:
    """The variable's current value."""
    value = variable.record.value
    if value is None:
        return VariableAnswer(semantic_var_id=variable.id, status="pending")
    return ready_answer(variable.id, variable.record.text, value.finish_reason, value.usage)


def ready_answer(variable_id: str, text: str, finish_reason: str, usage: Usage | KeptUsage) -> VariableAnswer:
    """A variable with its value."""
    return VariableAnswer(
        semantic_var_id=variable_id,
        status="ready",
        value=text,
        finish_reason=finish_reason,
        usage=VariableUsage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.output_tokens,
        ),
    )
