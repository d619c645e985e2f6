"""Requests with tools for tests: a recursive tool among them, and templates of all notations."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import jsonschema
from msgspec.structs import replace
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tools import ToolUse, tool_use
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    CalledTool,
    Message,
    ReplyPiece,
    TextPiece,
    ToolChoice,
    ToolSpec,
)
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.request import CompletionRequest

compile_once = functools.cache(compile_constraint)
ALL = {**TEMPLATES, **{name: WITHOUT_TOOLS[name] for name in ("chatml", "inst")}}
WEATHER = ToolSpec(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome", "</tool_call>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOW = ToolSpec("now", "", {"type": "object", "properties": {}})
TREE = ToolSpec(
    "tree",
    "Recursive, so that no machine can keep it.",
    {
        "type": "object",
        "properties": {"of": {"$ref": "#/$defs/node"}},
        "required": ["of"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
)
# The first shows the ids of calls, the second writes JSON with different spaces.
UNSTABLE = (TEMPLATES["mistral_with_ids"], TEMPLATES["spaced_hermes"])
REGULAR, ANY = (WEATHER, NOW), (WEATHER, NOW, TREE)
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
USER = Message("user", "What is the weather?")


def request(choice: ToolChoice = AUTO, tools: tuple[ToolSpec, ...] = REGULAR, **more) -> CompletionRequest:
    given = {
        "prompt": (USER,),
        "params": SamplingParams(max_tokens=200),
        "tools": tools,
        "tool_choice": choice,
    }
    return CompletionRequest(**(given | more))


def use_of(template: ChatTemplate, asked: CompletionRequest) -> ToolUse:
    return tool_use(template, asked.conversation.check())


def calls_of(pieces: Sequence[ReplyPiece]) -> list[CalledTool]:
    found: list[CalledTool] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            found.append(CalledTool(piece.id, piece.name, ""))
        elif isinstance(piece, Arguments):
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.text)
    return found


def prose_of(pieces: Sequence[ReplyPiece]) -> str:
    return "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])


def check(calls: Sequence[CalledTool], tools: Sequence[ToolSpec] = ANY) -> None:
    known = {tool.name: tool for tool in tools}
    for call in calls:
        jsonschema.Draft202012Validator(known[call.name].parameters).validate(json.loads(call.arguments))


CHOICES = {
    "required": REQUIRED,
    "one": ToolChoice("required", parallel=False),
    "named": ToolChoice("required", name="weather"),
}


def state_for(use: ToolUse, template: ChatTemplate) -> TokenState:
    state = TokenState(TOKENIZER, template)
    state.tools(use.tools)
    for message in use.messages:
        state.turn(message)
    state.begin_role("assistant")
    return state
