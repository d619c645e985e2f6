"""Requests of DSPy's engines as calls of agentflow."""

from __future__ import annotations

import json
from typing import Any, Final

from dspy import lm15

import agentflow as af
from agentflow.protocol.chat import ToolChoice, ToolSpec
from dspy_agentflow.answers import Asked
from dspy_agentflow.call_notes import CallNotes
from dspy_agentflow.settings import DEFAULT_MAX_TOKENS, EngineSettings

_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
# Arguments of ``af.gen`` that a Request has no field for: they stand in its ``extensions``.
_EXTENSIONS: Final = frozenset(
    (
        "min_tokens",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "regex",
        "choices",
        "grammar",
        "whitespace",
    )
)
_CONSTRAINTS: Final = frozenset(("regex", "choices", "grammar"))
_LEFT_OUT: Final = (lm15.ThinkingPart, lm15.ToolCallPart)


def asked_of(
    request: lm15.Request, settings: EngineSettings, notes: CallNotes, *, is_streamed: bool = False
) -> Asked:
    """All answers that are wanted, as a fork, where no seed says which ones. ``NotSupported`` where that
    cannot be done."""
    tools = [_tool(tool) for tool in request.tools]
    sampling = _sampling(request.config)
    if request.config.seed is not None:
        sampling["seed"] = notes.seed(request.config.seed, notes.num_given)
    if settings.timeout is not None:
        sampling["timeout_s"] = settings.timeout
    own = {name: sampling.pop(name) for name in _CONSTRAINTS if name in sampling}
    # With tools, an adapter reads calls, and prose beside them.
    found = None if own or tools else notes.answer_format
    wanted = {} if tools else _wanted(request.config)
    return Asked(
        messages_of(request),
        sampling,
        tools,
        _choice(request.config.tool_choice, bool(tools), notes.must_call),
        own or (wanted if found is None else found.constraint()),
        found,
        1 if is_streamed or "seed" in sampling else notes.n - notes.num_given,
        settings.cache_salt,
        is_streamed,
    )


def _sampling(config: lm15.Config) -> dict[str, Any]:
    _refuse(config)
    told = {name: getattr(config, name) for name in _SAMPLING if getattr(config, name) is not None}
    told.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if config.stop:
        told["stop"] = list(config.stop)
    if config.logprobs is not None:
        told |= {"logprobs": True, "top_logprobs": max(config.logprobs, 1)}
    told |= dict(config.extensions or {})
    if told.get("logit_bias"):
        told["logit_bias"] = {int(token): bias for token, bias in told["logit_bias"].items()}
    return told


def _refuse(config: lm15.Config) -> None:
    unknown = sorted((config.extensions or {}).keys() - _EXTENSIONS)
    if unknown:
        raise af.NotSupported(f"there is no parameter {', '.join(unknown)}")
    if config.reasoning is not None and not config.reasoning.is_off:
        raise af.NotSupported(
            "reasoning: these models have no dial for it (dspy.ChainOfThought asks for steps)"
        )
    if config.probabilities == "required":
        raise af.NotSupported("probabilities: an engine of agentflow's does not measure them here")


def _wanted(config: lm15.Config) -> dict[str, Any]:
    wanted = config.response_format
    if wanted is None:
        return {}
    return {"schema": wanted["schema"] if wanted["type"] == "json_schema" else {"type": "object"}}


def _choice(asked: lm15.ToolChoice | None, has_tools: bool, must_call: bool) -> ToolChoice:
    if not has_tools:
        return ToolChoice("none")
    if asked is None or (must_call and asked.mode == "auto" and not asked.allowed):
        # Where nothing but calls is wanted, an adapter could not read anything else.
        parallel = asked is None or asked.parallel is not False
        return ToolChoice("required" if must_call else "auto", parallel=parallel)
    parallel = asked.parallel is not False
    if len(asked.allowed) == 1 and asked.mode == "required":
        return ToolChoice("required", asked.allowed[0], parallel=parallel)
    if asked.allowed:
        raise af.NotSupported("tool_choice: some of the tools cannot be allowed: give just these tools")
    return ToolChoice(asked.mode, parallel=parallel)


def _tool(tool: Any) -> ToolSpec:
    if not isinstance(tool, lm15.FunctionTool):
        raise af.NotSupported(f"the tool {tool.name!r} runs elsewhere: give functions")
    return ToolSpec(tool.name, tool.description or "", tool.parameters)


def messages_of(request: lm15.Request) -> list[af.Message]:
    """The conversation. ``NotSupported`` where it holds what is no text."""
    told = []
    if request.system is not None:
        system = request.system if isinstance(request.system, str) else _text("system", request.system)
        told.append(af.Message("system", system))
    for message in request.messages:
        told += _turns(message)
    return told


def _turns(message: lm15.Message) -> list[af.Message]:
    if message.role == "tool":
        return [
            af.Message("tool", _text("tool", part.content), tool_call_id=part.id, name=part.name)
            for part in message.parts_of(lm15.ToolResultPart)
        ]
    calls = tuple(
        # As a model under a schema writes it: what it said is found again as the same tokens.
        [
            af.CalledTool(part.id, part.name, json.dumps(part.input, ensure_ascii=False))
            for part in message.parts_of(lm15.ToolCallPart)
        ]
    )
    role = "system" if message.role == "developer" else message.role
    return [af.Message(role, _text(role, message.parts), tool_calls=calls)]


def _text(role: str, parts: Any) -> str:
    return "".join([_part_text(role, part) for part in parts if not isinstance(part, _LEFT_OUT)])


def _part_text(role: str, part: Any) -> str:
    if isinstance(part, lm15.TextPart | lm15.RefusalPart):
        return str(part.text)
    if isinstance(part, lm15.DataPart):
        return json.dumps(part.value, ensure_ascii=False)
    raise af.NotSupported(
        f"a {role} message holds a part of the type {part.type!r}, and this model takes text"
    )
