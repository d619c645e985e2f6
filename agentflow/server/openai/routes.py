"""The routes of OpenAI's API."""

from __future__ import annotations

from agentflow.server.compatible.error_format import OPENAI
from agentflow.server.http.route import ApiRoute
from agentflow.server.openai.adapters import (
    AdapterUnloaded,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    unload_adapter,
)
from agentflow.server.openai.chat import create_chat_completion
from agentflow.server.openai.completions import TextAnswer, TextRequest, create_completion
from agentflow.server.openai.decisions import DecisionAnswer, DecisionRequest, create_decision
from agentflow.server.openai.embeddings import EmbeddingsAnswer, EmbeddingsRequest, create_embeddings
from agentflow.server.openai.models import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    detokenize,
    get_tokenizer_info,
    tokenize,
)
from agentflow.server.openai.responses.routes import ROUTES as RESPONSES_ROUTES
from agentflow.server.openai.types import ChatAnswer, ChatRequest

ROUTES = (
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
    *RESPONSES_ROUTES,
    ApiRoute(
        "POST",
        "/v1/decisions",
        create_decision,
        OPENAI,
        response=DecisionAnswer,
        request=DecisionRequest,
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
