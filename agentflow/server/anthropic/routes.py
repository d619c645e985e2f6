"""The routes of Anthropic's API."""

from __future__ import annotations

from agentflow.server.anthropic.answer import AnthropicErrorFormat
from agentflow.server.anthropic.messages import count_tokens, create_message
from agentflow.server.anthropic.types import CountAnswer, CountRequest, MessageAnswer, MessagesRequest
from agentflow.server.http.route import ApiRoute

ANTHROPIC = AnthropicErrorFormat()

ROUTES = (
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
)
