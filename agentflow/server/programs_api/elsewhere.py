"""Programs of other servers with the same store: requests go to the server that runs the program. When that
server is gone, finished values are read from the store, and all other requests fail, so that the client runs
the program again."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from agentflow.errors import EngineDown
from agentflow.server.compatible.error_format import read_error
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.event_stream import event
from agentflow.server.http.call import ApiCall
from agentflow.server.programs.shared_values import SharedValues
from agentflow.server.programs_api.answer import FAILED, FailedVariable, failed_variable, ready_answer
from agentflow.server.programs_api.types import (
    ClosedProgram,
    ProgramErrorBody,
    VariableAnswer,
    VariableDelta,
    VariableQuery,
)
from agentflow.server.stores.shared import FRONT_NAME


async def answer_elsewhere(call: ApiCall) -> None:
    """Answers a request for a program that does not run here. ``ApiError`` if there is none."""
    program_id, values = call.path_params["id"], call.service.programs.values
    if values is None or call.forwarded_for is not None:
        raise not_found(program_id)
    kept = await values.find_front(call.tenant.name, program_id)
    front = kept or front_in(program_id)  # a new program is stored shortly after its first answer
    if front is None or (call.service.fronts is not None and front == call.service.fronts.own):
        raise not_found(program_id)
    runs = await call.service.runs_at(front)
    if not runs and kept is None:
        raise not_found(program_id)
    if not runs and call.record.method == "DELETE":
        await values.close(call.tenant.name, program_id)
        await call.reply(ClosedProgram(id=program_id))
    elif call.record.method != "GET":
        if not runs:
            raise _gone()
        await call.relay(front)
    else:
        await _show(call, values, front if runs else None)


def front_in(program_id: str) -> str | None:
    """The server in the id of a program, or None.

    >>> front_in("prog_a-3f9c01d2_5f"), front_in("prog_5f")
    ('a-3f9c01d2', None)
    """
    parts = program_id.split("_")
    return parts[1] if len(parts) == 3 and FRONT_NAME.fullmatch(parts[1]) else None


async def _show(call: ApiCall, values: SharedValues, front: str | None) -> None:
    """Answers with a variable, from the server that runs its program, or from the store if that server is
    gone. A stream has the whole text at its end."""
    query = call.read_query(VariableQuery)
    if not query.stream:
        if front is not None:
            await call.relay(front)
        else:
            await call.reply(await _kept(call, values))
        return
    criteria = {} if query.criteria is None else {"criteria": query.criteria}
    failed: ApiError | None = None
    try:  # before the stream begins, so that another error has its status
        answer = await _read(call, values, front, {**criteria, "wait_s": "0"})
    except ApiError as error:
        if error.status != FAILED:
            raise
        failed = error
    if query.wait_s is not None:
        raise invalid_field("wait_s", "it excludes 'stream'")
    async with call.streaming() as stream:
        if failed is not None:
            raise failed
        if answer.status == "pending":
            answer = await _read(call, values, front, criteria)
        if answer.value:
            delta = VariableDelta(semantic_var_id=answer.semantic_var_id, at=0, delta=answer.value)
            await stream.send(event(msgspec.json.encode(delta)))
        await stream.end(event(msgspec.json.encode(answer)))


async def _read(
    call: ApiCall, values: SharedValues, front: str | None, query: Mapping[str, str]
) -> VariableAnswer:
    """A variable, from the server that runs its program, or from the store. ``query``: for that server."""
    if front is None:
        return await _kept(call, values)
    answered = await call.asked_elsewhere(front, urlencode(query).encode())
    if answered.status != 200:
        error = read_error(answered)
        path = msgspec.json.decode(answered.body, type=ProgramErrorBody).error.path
        if path is None:
            raise error
        raise FailedVariable(error.status, error.code, error.message, error.param, path=tuple(path))
    return msgspec.json.decode(answered.body, type=VariableAnswer)


async def _kept(call: ApiCall, values: SharedValues) -> VariableAnswer:
    """A value of a server that is gone. ``ApiError`` if the variable has failed; ``EngineDown`` if it was not
    finished."""
    variable_id = call.path_params["var"]
    found = await values.find(call.tenant.name, call.path_params["id"], variable_id)
    if found is None:
        raise _gone()
    if found.error is not None:
        raise failed_variable(variable_id, found.path, found.error)
    return ready_answer(variable_id, found.text, found.finish_reason, found.usage)


def _gone() -> EngineDown:
    return EngineDown("the server that ran this program is gone: open another program, and submit it again")


def not_found(program_id: str) -> ApiError:
    """The error for a program that does not exist."""
    text = f"there is no program {program_id[:100]!r}: it was closed, or has expired"
    return ApiError(404, "program_not_found", text)
