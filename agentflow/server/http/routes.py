"""The routes of the HTTP APIs: the handler of each path, and the format of its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentflow.server.anthropic.answer import AnthropicErrorFormat
from agentflow.server.anthropic.messages import count_tokens, create_message
from agentflow.server.anthropic.models import (
    AnthropicModel,
    AnthropicModelList,
    get_anthropic_model,
    list_anthropic_models,
)
from agentflow.server.anthropic.types import CountAnswer, CountRequest, MessageAnswer, MessagesRequest
from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall, ApiEndpoint, ErrorFormat, Handler, request_id_of
from agentflow.server.ollama.answer import OllamaErrorFormat
from agentflow.server.ollama.embedding import embed, embed_prompt
from agentflow.server.ollama.generation import chat, generate
from agentflow.server.ollama.models import list_running, list_tags, show_model, show_version
from agentflow.server.ollama.types import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaModelList,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
    RunningModelList,
)
from agentflow.server.openai.adapters import (
    AdapterUnloaded,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    unload_adapter,
)
from agentflow.server.openai.chat import create_chat_completion
from agentflow.server.openai.completions import TextAnswer, TextRequest, create_completion
from agentflow.server.openai.embeddings import EmbeddingsAnswer, EmbeddingsRequest, create_embeddings
from agentflow.server.openai.models import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    detokenize,
    get_model,
    get_tokenizer_info,
    list_models,
    tokenize,
)
from agentflow.server.openai.responses.answer import ResponsesErrorFormat
from agentflow.server.openai.responses.conversations import (
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from agentflow.server.openai.responses.responses import create_response
from agentflow.server.openai.responses.stored import (
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
)
from agentflow.server.openai.responses.types import (
    ConversationAnswer,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdateRequest,
    DeletedConversation,
    DeletedResponse,
    ItemList,
    ItemQuery,
    ListedItem,
    ResponseAnswer,
    ResponseQuery,
    ResponseRequest,
)
from agentflow.server.openai.types import ChatAnswer, ChatRequest
from agentflow.server.sglang.generation import generate as generate_as_sglang
from agentflow.server.sglang.models import show_model_info, show_server_info
from agentflow.server.sglang.types import (
    SglangAnswer,
    SglangModelInfo,
    SglangModelQuery,
    SglangRequest,
    SglangServerInfo,
)
from agentflow.server.tenants.keys import key_of_headers
from agentflow.server.tenants.tickets import SessionTicket

OLLAMA = OllamaErrorFormat()
ANTHROPIC = AnthropicErrorFormat()
RESPONSES = ResponsesErrorFormat()


_OLLAMA_PATHS = "/api/"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One method of one path. ``request``: the type of its body, if it has one; ``query``: the type of the
    parameters of its address; ``response``: the type, or types, of the answer with status 200; ``streams``:
    whether ``"stream": true`` gets server-sent events instead. The OpenAPI document is derived from these
    (openapi.py)."""

    method: str
    path: str
    handler: Handler
    error_format: ErrorFormat
    response: type[Any] | tuple[type[Any], ...]
    request: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    streams: bool = False


async def create_session_ticket(call: ApiCall) -> None:
    """Returns a ticket with which a page opens one session."""
    tenants = call.service.tenants
    await call.reply(tenants.tickets.issue(call.tenant, key_of_headers(call.headers)))


def _of_client(openai: Handler, anthropic: Handler) -> Handler:
    """Both APIs have this route. Anthropic's clients name its version."""

    @wraps(openai)
    async def handle(call: ApiCall) -> None:
        await (anthropic if "anthropic-version" in call.headers else openai)(call)

    return handle


ROUTES = (
    ApiRoute("POST", "/v1/session-ticket", create_session_ticket, OPENAI, response=SessionTicket),
    ApiRoute(
        "GET",
        "/v1/models",
        _of_client(list_models, list_anthropic_models),
        OPENAI,
        response=(ModelList, AnthropicModelList),
    ),
    ApiRoute(
        "GET",
        "/v1/models/{name:path}",
        _of_client(get_model, get_anthropic_model),
        OPENAI,
        response=(ModelCard, AnthropicModel),
    ),
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        OPENAI,
        response=ChatAnswer,
        request=ChatRequest,
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/v1/completions",
        create_completion,
        OPENAI,
        response=TextAnswer,
        request=TextRequest,
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/v1/responses",
        create_response,
        RESPONSES,
        response=ResponseAnswer,
        request=ResponseRequest,
        streams=True,
    ),
    ApiRoute(
        "GET",
        "/v1/responses/{id}",
        get_response,
        RESPONSES,
        response=ResponseAnswer,
        query=ResponseQuery,
        streams=True,
    ),
    ApiRoute("DELETE", "/v1/responses/{id}", delete_response, RESPONSES, response=DeletedResponse),
    ApiRoute("POST", "/v1/responses/{id}/cancel", cancel_response, RESPONSES, response=ResponseAnswer),
    ApiRoute(
        "GET",
        "/v1/responses/{id}/input_items",
        list_input_items,
        RESPONSES,
        response=ItemList,
        query=ItemQuery,
    ),
    ApiRoute(
        "POST",
        "/v1/conversations",
        create_conversation,
        OPENAI,
        response=ConversationAnswer,
        request=ConversationRequest,
    ),
    ApiRoute("GET", "/v1/conversations/{id}", get_conversation, OPENAI, response=ConversationAnswer),
    ApiRoute(
        "POST",
        "/v1/conversations/{id}",
        update_conversation,
        OPENAI,
        response=ConversationAnswer,
        request=ConversationUpdateRequest,
    ),
    ApiRoute("DELETE", "/v1/conversations/{id}", delete_conversation, OPENAI, response=DeletedConversation),
    ApiRoute("GET", "/v1/conversations/{id}/items", list_items, OPENAI, response=ItemList, query=ItemQuery),
    ApiRoute(
        "POST",
        "/v1/conversations/{id}/items",
        create_items,
        OPENAI,
        response=ItemList,
        request=ConversationItemsRequest,
    ),
    ApiRoute("GET", "/v1/conversations/{id}/items/{item_id}", get_item, OPENAI, response=ListedItem),
    ApiRoute(
        "DELETE",
        "/v1/conversations/{id}/items/{item_id}",
        delete_item,
        OPENAI,
        response=ConversationAnswer,
    ),
    ApiRoute(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        OPENAI,
        response=EmbeddingsAnswer,
        request=EmbeddingsRequest,
    ),
    ApiRoute(
        "POST",
        "/v1/messages",
        create_message,
        ANTHROPIC,
        response=MessageAnswer,
        request=MessagesRequest,
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        ANTHROPIC,
        response=CountAnswer,
        request=CountRequest,
    ),
    ApiRoute(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        OPENAI,
        response=ModelCard,
        request=LoadAdapterRequest,
    ),
    ApiRoute(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        OPENAI,
        response=AdapterUnloaded,
        request=UnloadAdapterRequest,
    ),
    ApiRoute(
        "POST",
        "/api/chat",
        chat,
        OLLAMA,
        response=OllamaChatAnswer,
        request=OllamaChatRequest,
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/api/generate",
        generate,
        OLLAMA,
        response=OllamaGenerateAnswer,
        request=OllamaGenerateRequest,
        streams=True,
    ),
    ApiRoute("POST", "/api/embed", embed, OLLAMA, response=OllamaEmbedAnswer, request=OllamaEmbedRequest),
    ApiRoute(
        "POST",
        "/api/embeddings",
        embed_prompt,
        OLLAMA,
        response=OllamaEmbeddingsAnswer,
        request=OllamaEmbeddingsRequest,
    ),
    ApiRoute("GET", "/api/tags", list_tags, OLLAMA, response=OllamaModelList),
    ApiRoute("GET", "/api/ps", list_running, OLLAMA, response=RunningModelList),
    ApiRoute("POST", "/api/show", show_model, OLLAMA, response=OllamaShowAnswer, request=OllamaShowRequest),
    ApiRoute("GET", "/api/version", show_version, OLLAMA, response=OllamaVersion),
    ApiRoute(
        "POST",
        "/generate",
        generate_as_sglang,
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
    ApiRoute("GET", "/tokenizer_info", get_tokenizer_info, OPENAI, response=TokenizerInfo),
    *(
        ApiRoute("POST", f"{prefix}/{name}", handler, OPENAI, response=response, request=request)
        for prefix in ("", "/v1")
        for name, handler, response, request in (
            ("tokenize", tokenize, TokenizeAnswer, TokenizeRequest),
            ("detokenize", detokenize, DetokenizeAnswer, DetokenizeRequest),
        )
    ),
)


def api_routes() -> Sequence[BaseRoute]:
    """The routes for starlette."""
    return [
        Route(
            route.path,
            ApiEndpoint(route.handler, route.error_format, route=route.path.partition("{")[0]),
            methods=[route.method],
        )
        for route in ROUTES
    ]


def error_format_of(path: str) -> ErrorFormat:
    """The format of errors of ``path``, which need not exist."""
    for route in ROUTES:
        if path == route.path or path.startswith(f"{route.path}/"):
            return route.error_format
    return OLLAMA if path.startswith(_OLLAMA_PATHS) else OPENAI


def error_response(
    path: str, request_headers: Headers, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error that occurs before a handler has the request. ``headers``: more headers of
    the response."""
    error_format = error_format_of(path)
    request_id = request_id_of(request_headers)
    own = {error_format.request_id_header.decode(): request_id}
    return Response(
        error_format.body(error, request_id),
        status_code=error_format.status(error),
        media_type="application/json",
        headers={**(headers or {}), **own},
    )
