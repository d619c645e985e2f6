"""The endpoints of programs: create and close a program, submit a request, read and set a variable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import msgspec

from agentflow.errors import Overloaded, RateLimited
from agentflow.protocol.events import Delta, Value, VarFailed
from agentflow.server.errors import RETRY_AFTER_S, ApiError, invalid_field
from agentflow.server.event_stream import event
from agentflow.server.http.call import ApiCall, Handler
from agentflow.server.programs.program import ProgramEnded, ProgramVariable, ServedProgram, VariableTaken
from agentflow.server.programs_api.answer import failure, make_variable_answer
from agentflow.server.programs_api.elsewhere import answer_elsewhere, not_found
from agentflow.server.programs_api.prompt import read_prompt
from agentflow.server.programs_api.types import (
    VARIABLE_ID,
    ClosedProgram,
    ProgramAnswer,
    ProgramRequest,
    SubmitAnswer,
    SubmitRequest,
    ValueRequest,
    VariableDelta,
    VariableId,
    VariableQuery,
)
from agentflow.server.tenants.keys import key_of_headers

LIMIT = "program_limit_exceeded"


async def create_program(call: ApiCall) -> None:
    """Creates a program."""
    body = await call.process(call.read, ProgramRequest)
    service, tenant, key = call.service, call.tenant, key_of_headers(call.headers)
    models = service.models.of_session(body.model, tenant)
    with _within_limits():
        program = await service.programs.open(
            models,
            tenant.name,
            program_id=service.new_id("prog", 16),
            cache_salt=body.cache_salt or "",
            is_valid=lambda: service.tenants.still_names(key, tenant),
            graphs=service.sessions.graphs.of(tenant.name),
        )
    call.record.model = models.default.capabilities.model
    await call.reply(ProgramAnswer(id=program.id))


def _of_program(handler: Callable[[ApiCall, ServedProgram], Awaitable[None]]) -> Handler:
    """Makes a handler find the program by the id in the path. ``ApiError`` if the tenant has no such program,
    or if it ends meanwhile."""

    @wraps(handler)
    async def handle(call: ApiCall) -> None:
        program_id = call.path_params["id"]
        with call.service.programs.store.using(call.tenant.name, program_id) as program:
            if program is not None:
                try:
                    await handler(call, program)
                except ProgramEnded:
                    raise not_found(program_id) from None
                return
        await answer_elsewhere(call)

    return handle


@_of_program
async def close_program(call: ApiCall, program: ServedProgram) -> None:
    """Closes a program. Everything that it runs is cancelled."""
    call.service.programs.close(program)
    await call.reply(ClosedProgram(id=program.id))


@_of_program
async def submit_request(call: ApiCall, program: ServedProgram) -> None:
    """Submits a request, and returns when it is accepted."""
    body = await call.process(call.read, SubmitRequest)
    pieces, placed = await call.process(read_prompt, body)
    try:
        with _within_limits():
            await program.submit(pieces, model=body.model or "", trace=call.trace)
    except VariableTaken as error:
        number = [one.semantic_var_id for one in placed].index(error.variable)
        raise invalid_field(f"placeholders[{number}].semantic_var_id", str(error)) from None
    await call.reply(SubmitAnswer(placeholders=placed))


@_of_program
async def get_variable(call: ApiCall, program: ServedProgram) -> None:
    """Waits for the value of a variable and returns it, or streams it."""
    query = call.read_query(VariableQuery)
    with _within_limits():
        variable = program.find(call.path_params["var"])
        if variable is None:
            text = f"the program has no variable {call.path_params['var'][:100]!r}"
            raise ApiError(404, "variable_not_found", text)
        if query.criteria is not None:
            await program.prefer(variable, query.criteria, "stream" if query.stream else "value")
        if query.stream:
            if query.wait_s is not None:
                raise invalid_field("wait_s", "it excludes 'stream'")
            await _stream(call, program, variable)
            return
        await program.wait(variable, query.wait_s)
        if variable.record.error is not None:
            raise await failure(program, variable)
        answer = make_variable_answer(variable)
    await call.reply(answer)


async def _stream(call: ApiCall, program: ServedProgram, variable: ProgramVariable) -> None:
    with program.reading(variable) as cursor:
        async with call.streaming() as stream:
            while True:
                await cursor.wait()
                events = cursor.drain()
                sent = b""
                for one in events:
                    if isinstance(one, Delta | Value) and one.text:
                        delta = VariableDelta(semantic_var_id=variable.id, at=one.at, delta=one.text)
                        sent += event(msgspec.json.encode(delta))
                await stream.send(sent)
                if program.has_ended:
                    raise ProgramEnded
                if not any(isinstance(one, Value | VarFailed) for one in events):
                    continue  # if it ended during the send, text is not sent yet
                if variable.record.error is not None:
                    raise await failure(program, variable)
                await stream.end(event(msgspec.json.encode(make_variable_answer(variable))))
                return


@_of_program
async def set_variable(call: ApiCall, program: ServedProgram) -> None:
    """Sets a variable that is not the output of a request."""
    body = await call.process(call.read, ValueRequest)
    try:
        variable_id = msgspec.convert(call.path_params["var"], VariableId)
    except msgspec.ValidationError:
        raise invalid_field("var", f"an id has the form {VARIABLE_ID}") from None
    try:
        with _within_limits():
            await program.set(variable_id, body.value)
    except VariableTaken as error:
        raise invalid_field("var", str(error)) from None
    variable = program.find(variable_id)
    assert variable is not None
    await call.reply(make_variable_answer(variable))


@contextmanager
def _within_limits() -> Iterator[None]:
    """Converts errors about a program's limits to status 429."""
    try:
        yield
    except (Overloaded, RateLimited) as error:
        raise ApiError(429, LIMIT, str(error), retry_after_s=RETRY_AFTER_S) from error
