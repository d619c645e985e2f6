"""The routes of programs."""

from __future__ import annotations

from agentflow.server.http.route import ApiRoute
from agentflow.server.programs_api.answer import FAILED, PROGRAMS
from agentflow.server.programs_api.programs import (
    close_program,
    create_program,
    get_variable,
    set_variable,
    submit_request,
)
from agentflow.server.programs_api.types import (
    ClosedProgram,
    ProgramAnswer,
    ProgramRequest,
    SubmitAnswer,
    SubmitRequest,
    ValueRequest,
    VariableAnswer,
    VariableQuery,
)

_VARIABLE = "/v1/programs/{id}/variables/{var}"

ROUTES = (
    ApiRoute(
        "POST", "/v1/programs", create_program, PROGRAMS, response=ProgramAnswer, request=ProgramRequest
    ),
    ApiRoute("DELETE", "/v1/programs/{id}", close_program, PROGRAMS, response=ClosedProgram),
    ApiRoute(
        "POST",
        "/v1/programs/{id}/submit",
        submit_request,
        PROGRAMS,
        response=SubmitAnswer,
        request=SubmitRequest,
    ),
    ApiRoute(
        "GET",
        _VARIABLE,
        get_variable,
        PROGRAMS,
        response=VariableAnswer,
        query=VariableQuery,
        statuses=(FAILED,),
        streams=True,
    ),
    ApiRoute("PUT", _VARIABLE, set_variable, PROGRAMS, response=VariableAnswer, request=ValueRequest),
)
