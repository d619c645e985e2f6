"""The routes of Ollama's API."""

from __future__ import annotations

from agentflow.server.http.route import ApiRoute
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

OLLAMA = OllamaErrorFormat()

ROUTES = (
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
)
