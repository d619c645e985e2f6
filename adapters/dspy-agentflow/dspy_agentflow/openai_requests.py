"""Requests as OpenAI's API has them, which LMs of DSPy before 3.4 make, as calls of agentflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pydantic

import agentflow as af
from agentflow.language.values import spec_of
from agentflow.protocol.chat import ToolChoice, ToolSpec
from dspy_agentflow.answers import Asked
from dspy_agentflow.call_notes import CallNotes
from dspy_agentflow.settings import DEFAULT_MAX_TOKENS, EngineSettings

_SAMPLING: Final = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "stop": "stop",
}
_CONSTRAINTS: Final = ("regex", "choices", "grammar")
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_ELSEWHERE: Final = ("model", "messages", "n", "num_generations", "rollout_id", "response_format")


def asked_of(request: Mapping[str, Any], settings: EngineSettings, notes: CallNotes) -> list[Asked]:
    """All answers that are wanted: one fork, or, where a seed says which ones, one by one. ``BadArgument``
    for what there is not."""
    request = {name: value for name, value in request.items() if value is not None}
    unknown = request.keys() - _SAMPLING.keys() - set(_CONSTRAINTS) - set(_TOOLS) - set(_ELSEWHERE)
    if unknown:
        raise af.BadArgument(f"there is no parameter {', '.join(sorted(unknown))}")
    sampling: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    sampling |= {name: request[key] for key, name in _SAMPLING.items() if key in request}
    if settings.timeout is not None:
        sampling["timeout_s"] = settings.timeout
    tools = [spec_of(tool) for tool in request.get("tools", ())]
    own = {name: request[name] for name in _CONSTRAINTS if name in request}
    # With tools, an adapter reads calls, and prose beside them.
    found = None if own or tools else notes.answer_format
    wanted = {} if tools else _wanted(request.get("response_format"))
    asked: dict[str, Any] = {
        "messages": [_turn(message) for message in request["messages"]],
        "tools": tools,
        "choice": _choice(request, tools, notes.must_call),
        "constraint": own or (wanted if found is None else found.constraint()),
        "answer_format": found,
        "cache_salt": settings.cache_salt,
    }
    n = request.get("n", 1)
    if "seed" not in sampling:
        return [Asked(sampling=sampling, n=n, **asked)]
    seeds = [notes.seed(sampling["seed"], number) for number in range(n)]
    return [Asked(sampling={**sampling, "seed": seed}, **asked) for seed in seeds]


def _wanted(response_format: Any) -> dict[str, Any]:
    if response_format is None:
        return {}
    if isinstance(response_format, type) and issubclass(response_format, pydantic.BaseModel):
        return {"schema": response_format.model_json_schema()}
    if response_format.get("type") == "json_schema":
        return {"schema": response_format["json_schema"]["schema"]}
    return {"schema": {"type": "object"}}


def _choice(request: Mapping[str, Any], tools: list[ToolSpec], must_call: bool) -> ToolChoice:
    if not tools:
        return ToolChoice("none")
    parallel = request.get("parallel_tool_calls") is not False
    asked = request.get("tool_choice", "auto")
    if isinstance(asked, Mapping):
        return ToolChoice("required", asked["function"]["name"], parallel=parallel)
    return ToolChoice("required" if must_call and asked == "auto" else asked, parallel=parallel)


def _turn(message: Mapping[str, Any]) -> af.Message:
    calls = [
        af.CalledTool(call["id"], call["function"]["name"], _spaced(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    role = "system" if message["role"] == "developer" else message["role"]
    return af.Message(
        role,
        _text(message.get("content")),
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name") if role == "tool" else None,
    )


def _spaced(arguments: str) -> str:
    """As a model under a schema writes it: what it said is found again as the same tokens."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        return arguments


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for block in content:
        if block.get("type") != "text":
            raise af.NotSupported(f"a message holds {block.get('type')!r}, and this model takes text")
    return "".join([block["text"] for block in content])
