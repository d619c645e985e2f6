"""The routes of OpenAI's Responses API and of its conversations."""

from __future__ import annotations

from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.http.route import ApiRoute
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
from agentflow.server.openai.responses.responses import count_input_tokens, create_response
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
    InputTokens,
    ItemList,
    ItemQuery,
    ListedItem,
    ResponseAnswer,
    ResponseQuery,
    ResponseRequest,
)

RESPONSES = ResponsesErrorFormat()

ROUTES = (
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
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        RESPONSES,
        response=InputTokens,
        request=ResponseRequest,
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
)
