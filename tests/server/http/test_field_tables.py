"""The tables of fields that are refused, or have no effect, have the names of fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from agentflow.engine.messages import EngineStats
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.anthropic.types import MessagesRequest
from agentflow.server.compatible import fields
from agentflow.server.completion import api_run
from agentflow.server.http import call
from agentflow.server.metrics import metrics
from agentflow.server.ollama.types import OllamaChatRequest, OllamaGenerateRequest
from agentflow.server.openai import chat, request
from agentflow.server.openai.completions import TextRequest
from agentflow.server.openai.decisions import DecisionRequest
from agentflow.server.openai.responses import responses
from agentflow.server.openai.responses.types import ResponseRequest
from agentflow.server.openai.types import AssistantMessage, ChatRequest, SharedFields
from agentflow.server.sglang import generation
from agentflow.server.sglang.types import SamplingFields, SglangRequest

BEFORE_MODELS = (
    ChatRequest,
    TextRequest,
    ResponseRequest,
    DecisionRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
"""The bodies of requests that a model behind an API can answer."""

TABLES: dict[str, tuple[Collection[str], type[msgspec.Struct]]] = {
    "chat and completions": (request._WHY_UNSUPPORTED, SharedFields),
    "chat": (chat._WHY_UNSUPPORTED, ChatRequest),
    "assistant message": (request._UNSUPPORTED_MEMBERS, AssistantMessage),
    "responses": (responses._UNSUPPORTED, ResponseRequest),
    "generate": (generation._WHY_UNSUPPORTED, SglangRequest),
    "sampling_params": (generation._WHY_UNSUPPORTED_SAMPLING, SamplingFields),
    "names of sampling_params": (generation._NAMES.values(), SamplingFields),
    "names of the engine": (generation._NAMES, SamplingParams),
    "sent to APIs": (api_run._SENT_IF_GIVEN, SamplingParams),
    "counters": (metrics.COUNTERS, EngineStats),
    "shown counters": ([name for name, _ in metrics._ENGINE_COUNTERS], EngineStats),
    "gauges": (("media_feature_bytes", "media_pixel_bytes", "step_times"), EngineStats),
}
NEUTRAL: dict[str, tuple[Collection[str], Collection[str]]] = {
    "chat and completions": (request._NEUTRAL, request._WHY_UNSUPPORTED),
    "chat": (chat._NEUTRAL, chat._WHY_UNSUPPORTED),
    "generate": (
        generation._NEUTRAL,
        {*generation._WHY_UNSUPPORTED, *generation._WHY_UNSUPPORTED_SAMPLING},
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_f37_a_table_has_the_names_of_fields(table: str) -> None:
    names, kind = TABLES[table]
    assert set(names) - set(kind.__struct_fields__) == set()


@pytest.mark.parametrize("table", NEUTRAL)
def test_f37_a_neutral_value_is_of_a_field_that_is_refused(table: str) -> None:
    neutral, refused = NEUTRAL[table]
    assert set(neutral) - set(refused) == set()


@pytest.mark.parametrize("name", call._ENGINE_FIELDS)
def test_f37_a_field_that_needs_an_engine_is_a_field_of_an_api(name: str) -> None:
    assert any(name in kind.__struct_fields__ for kind in BEFORE_MODELS)


def is_refused(kind: type[msgspec.Struct], name: str) -> bool:
    """Whether the type of the field allows no value that has an effect."""
    hint = get_type_hints(kind, include_extras=True)[name]
    unsupported = (fields.Unsupported, fields.UnsupportedText, fields.OnlyTrue, fields.OnlyFalse)
    return any(one in unsupported for one in (hint, *get_args(hint)))


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        (ChatRequest, [request._WHY_UNSUPPORTED, chat._WHY_UNSUPPORTED]),
        (TextRequest, [request._WHY_UNSUPPORTED]),
        (ResponseRequest, [responses._UNSUPPORTED]),
        (SglangRequest, [generation._WHY_UNSUPPORTED]),
        (SamplingFields, [generation._WHY_UNSUPPORTED_SAMPLING]),
    ],
)
def test_f37_a_field_without_an_allowed_value_is_refused(
    kind: type[msgspec.Struct], tables: list[dict[str, Any]]
) -> None:
    refused = {name for name in kind.__struct_fields__ if is_refused(kind, name)}
    assert refused
    assert refused - {name for table in tables for name in table} == set()
