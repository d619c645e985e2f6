"""The routes of SGLang's API."""

from __future__ import annotations

from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.http.route import ApiRoute
from agentflow.server.sglang.generation import generate
from agentflow.server.sglang.models import show_model_info, show_server_info
from agentflow.server.sglang.types import (
    SglangAnswer,
    SglangModelInfo,
    SglangModelQuery,
    SglangRequest,
    SglangServerInfo,
)

ROUTES = (
    ApiRoute(
        "POST",
        "/generate",
        generate,
        OPENAI,
        response=(SglangAnswer, list[SglangAnswer]),
        request=SglangRequest,
        streams=True,
    ),
    *(
        ApiRoute("GET", path, show_model_info, OPENAI, response=SglangModelInfo, query=SglangModelQuery)
        for path in ("/get_model_info", "/model_info")
    ),
    *(
        ApiRoute("GET", path, show_server_info, OPENAI, response=SglangServerInfo)
        for path in ("/get_server_info", "/server_info")
    ),
)
