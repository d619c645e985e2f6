"""The requests of Anthropic's messages API.

``AnthropicMessages`` is the ``ApiFormat`` of the API. It refuses parameters and features that the
``ModelFacts`` of the model exclude, before anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, AnswerCollector
from agentflow.backends.apis.capability_table import ModelFacts
from agentflow.backends.apis.generation.api_format import ApiRequest, Call, cannot_continue, turns_only
from agentflow.backends.apis.generation.conversation import (
    IMAGE_TOKENS,
    ApiContext,
    MessageNode,
    list_images,
    shared_gate,
)
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.file_slots import slot
from agentflow.backends.apis.messages.anthropic_schema import (
    MAX_STRICT_TOOLS,
    MAX_TOOL_UNIONS,
    MAX_UNIONS,
    is_enforced,
    num_unions,
    output_schema,
)
from agentflow.backends.apis.messages.anthropic_stream import MessagesReader, call_block
from agentflow.backends.apis.messages.cache_marks import PromptPart, marked_parts
from agentflow.backends.apis.strict_schema import StrictSchema, Unwrap, enum_schema, strict_schema, unwrapped
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.images import Image

DEFAULT_MAX_TOKENS: Final = 4096
"""The limit of a model whose own limit is unknown."""
MIN_BUDGET: Final = 1024
"""The fewest tokens that a budget of reasoning may have."""
_FIELDS: Final = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}

_encode = msgspec.json.Encoder().encode


class AnthropicMessages:
    """The format of ``/v1/messages``.

    Args:
        model: The model's name.
        facts: The features of the model.
        errors: Makes the errors.
        reasoning: Whether the model reasons; None: as it does by default.
        effort: How much it reasons and writes.
    """

    path = "v1/messages"
    min_tokens = 1

    def __init__(
        self,
        model: str,
        facts: ModelFacts,
        errors: ErrorMapping,
        *,
        reasoning: bool | None = None,
        effort: str | None = None,
    ) -> None:
        self._model = model
        self._facts = facts
        self.may_stop_reasoning = reasoning is None and facts.may_stop_reasoning
        self._errors = errors
        self._reasoning = reasoning
        self._effort = effort
        self._head = b'{"model":' + _encode(model)
        self._last_tools: tuple[ToolSpec, ...] = ()
        self._last_parts: list[PromptPart] = []

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""
        if context.is_plain:
            raise turns_only(self._model)
        thinking, reasons = self._thinking(call)
        prompt = self._prompt(context, reasons)
        max_unions = MAX_UNIONS - MAX_TOOL_UNIONS if context.tools else MAX_UNIONS
        constrained = self._constrained(call.constraint, prompt, max_unions)
        fields: dict[str, Any] = {"stream": True, **thinking}
        fields |= self._sampling(call, reasons, is_wrapped=constrained.unwrap is not None)
        output = {"effort": self._effort, "format": constrained.format}
        if given := {name: value for name, value in output.items() if value is not None}:
            fields["output_config"] = given
        tools: list[PromptPart] = []
        if context.tools:
            choice = context.choice if call.is_reply else ToolChoice("none")
            has_budget = thinking.get("thinking", {}).get("type") == "enabled"
            fields |= self._choice(choice, has_budget=has_budget)
            tools = self._tools(context.tools)
        body = self._body(tools, prompt, fields)
        return ApiRequest(
            self.path,
            body,
            constrained.unwrap,
            prompt.lead,
            shared_gate(prompt.nodes, self._facts.min_cached_tokens),
            list_images(prompt.nodes),
        )

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> MessagesReader:
        """The reader of a stream."""
        return MessagesReader(answer, self._errors, request.num_chars, lead=request.lead)

    def _prompt(self, context: ApiContext, reasons: bool) -> _Prompt:
        """The messages. ``NotSupported`` if the open turn has text that the model cannot continue."""
        if not context.open_text:
            return _Prompt(context.messages())
        if not self._facts.continuation or reasons:
            why = " while it reasons" if self._facts.continuation else ""
            raise cannot_continue(self._model, why)
        # The API refuses white space at the end of a text that is continued.
        message = context.open_message()
        text = message.content.rstrip()
        nodes = context.messages(with_open=False)
        continues = bool(text or message.tool_calls)
        if continues:
            nodes.append(MessageNode(context.last, msgspec.structs.replace(message, content=text)))
        return _Prompt(nodes, message.content[len(text) :], continues)

    def _body(self, tools: list[PromptPart], prompt: _Prompt, fields: dict[str, Any]) -> bytes:
        nodes = prompt.nodes
        roles = [node.message.role for node in nodes]
        num_first = next((number for number, role in enumerate(roles) if role != "system"), len(nodes))
        system = [_system_part(node) for node in nodes[:num_first] if node.message.content.strip()]
        messages = self._message_parts(nodes[num_first:])
        if not messages:
            raise NotSupported(f"{self._model} answers a user: begin with af.user(…)")
        if prompt.continues:
            messages[-1] = messages[-1]._replace(is_open=True)
        marked = marked_parts([*tools, *system, *messages])
        written = [self._head]
        for name, parts in ((b"tools", tools), (b"system", system), (b"messages", messages)):
            if parts:
                encoded, marked = marked[: len(parts)], marked[len(parts) :]
                written.append(b',"%s":[%s]' % (name, b",".join(encoded)))
        return b"".join([*written, b",", _encode(fields)[1:]])

    def _message_parts(self, nodes: list[MessageNode]) -> list[PromptPart]:
        """The messages. Results of tools that follow one another are one message, as the API demands."""
        parts: list[PromptPart] = []
        results: list[bytes] = []
        for number, node in enumerate(nodes):
            role = node.message.role
            if role == "system" and not self._facts.inline_system:
                raise NotSupported(
                    f"{self._model} takes system turns only before all others: put this one first, or write "
                    "it as af.user(…)"
                )
            encoded = node.encoded(_encoded)
            if not encoded:
                continue
            if role == "tool":
                results.append(encoded)
                if number + 1 < len(nodes) and nodes[number + 1].message.role == "tool":
                    continue
                encoded = b'{"role":"user","content":[%s]}' % b",".join(results)
                results.clear()
            is_constant = not node.message.generated and role != "tool"
            media_bytes = CHARS_PER_TOKEN * IMAGE_TOKENS * len(node.message.images)
            parts.append(
                PromptPart(
                    encoded,
                    b"}]}",
                    is_constant=is_constant,
                    is_shared=node.gate is not None,
                    media_bytes=media_bytes,
                )
            )
        return parts

    def _thinking(self, call: Call) -> tuple[dict[str, Any], bool]:
        """The fields that turn reasoning on or off, and whether the model reasons."""
        facts, asked = self._facts, call.params.max_reasoning_tokens
        reasons = self._reasoning if asked is None else asked > 0
        if reasons is False:
            if facts.reasoning == "always":
                raise NotSupported(
                    f"{self._model} always reasons: leave out max_reasoning_tokens=0 and reasoning=False",
                    param="max_reasoning_tokens",
                )
            return ({"thinking": {"type": facts.reasoning_off}} if facts.reasoning_off else {}), False
        if reasons is None and not facts.reasons_by_default:
            return {}, False
        if facts.reasoning == "never":
            raise NotSupported(f"{self._model} does not reason", param="max_reasoning_tokens")
        if asked is None and facts.adaptive:
            # The text of the reasoning is left out by default in the newest models.
            return {"thinking": {"type": "adaptive", "display": "summarized"}}, True
        return {"thinking": {"type": "enabled", "budget_tokens": self._budget(call)}}, True

    def _budget(self, call: Call) -> int:
        asked, most = call.params.max_reasoning_tokens, self._max_tokens(call)
        if asked is None:
            asked = max(MIN_BUDGET, most // 2)
        elif "max_reasoning_tokens" not in self._facts.parameters(reasons=True):
            raise NotSupported(
                f"{self._model} chooses how much it reasons: leave out max_reasoning_tokens, or give "
                "af.Anthropic(…, effort=…)",
                param="max_reasoning_tokens",
            )
        if not MIN_BUDGET <= asked < most:
            raise NotSupported(
                f"{self._model} reasons with at least {MIN_BUDGET} tokens, which count towards max_tokens: "
                f"max_reasoning_tokens={asked} does not fit max_tokens={most}",
                param="max_reasoning_tokens",
            )
        return asked

    def _max_tokens(self, call: Call) -> int:
        asked = call.given.get("max_tokens")
        if asked is None:
            # The API demands a limit.
            return self._facts.default_max_tokens or self._facts.output or DEFAULT_MAX_TOKENS
        if self._facts.output is not None and asked > self._facts.output:
            raise NotSupported(
                f"{self._model} writes at most {self._facts.output:,} tokens, and max_tokens is {asked:,}",
                param="max_tokens",
            )
        return int(asked)

    def _sampling(self, call: Call, reasons: bool, *, is_wrapped: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": self._max_tokens(call)}
        accepted = self._facts.parameters(reasons)
        given = dict(call.given)
        if call.params.wants_logprobs:
            given["logprobs"] = True
        for name, value in given.items():
            if name in ("max_tokens", "max_reasoning_tokens", "stop_regex"):
                continue  # the last one is applied to the text as it comes
            if name == "stop":
                # A stop would cut the object around the text; the API takes none of white space.
                stops = [] if is_wrapped else [stop for stop in value if stop.strip()]
                if stops:
                    fields["stop_sequences"] = stops
                continue
            if name not in accepted or name not in _FIELDS:
                why = " while it reasons" if name in self._facts.sampling else ""
                raise NotSupported(f"{self._model} does not support {name}{why}: leave it out", param=name)
            fields[_FIELDS[name]] = value
        together = [name for name in self._facts.exclusive if name in given]
        if len(together) > 1:
            raise NotSupported(
                f"{self._model} takes only one of {' and '.join(together)}: leave one out", param=together[-1]
            )
        if fields.get("temperature", 0.0) > self._facts.max_temperature:
            raise NotSupported(
                f"{self._model} takes a temperature of at most {self._facts.max_temperature:g}, not "
                f"{fields['temperature']:g}",
                param="temperature",
            )
        return fields

    def _constrained(self, constraint: Constraint | None, prompt: _Prompt, max_unions: int) -> _Constrained:
        """The format of the output that enforces a constraint."""
        if constraint is None:
            return _Constrained()
        found = constraint.as_one_of(("schema", "choices") if "schema" in self._facts.constraints else ())
        if found is None or constraint.instead is not None or prompt.continues:
            why = " in a turn that it continues" if found is not None and prompt.continues else ""
            raise NotSupported(
                f"{self._model} does not enforce constraints of the kind {constraint.kind!r}{why}: set "
                'on_unsupported="retry" to have answers checked and asked for again'
            )
        if found.kind == "choices":
            return _Constrained(_format(enum_schema(found.choices)), _chosen)
        schema, unwrap = _output_schema(found.source, max_unions)
        return _Constrained(_format(schema), unwrap)

    def _tools(self, tools: tuple[ToolSpec, ...]) -> list[PromptPart]:
        """The tools, each encoded once: most calls have the same tools as the call before."""
        if tools is not self._last_tools:
            parts = [PromptPart(_encode(fields), b"}", is_head=True) for fields in self._described(tools)]
            self._last_tools, self._last_parts = tools, parts
        return self._last_parts

    def _described(self, tools: tuple[ToolSpec, ...]) -> Iterator[dict[str, Any]]:
        """The fields of the tools. The API enforces the schemas of the first ones as far as its limits allow.
        The program checks the arguments of the others."""
        num_strict = MAX_STRICT_TOOLS if "schema" in self._facts.constraints else 0
        unions = MAX_TOOL_UNIONS
        for tool in tools:
            fields: dict[str, Any] = {"name": tool.name, "input_schema": tool.parameters}
            if tool.description:
                fields["description"] = tool.description
            if tool.strict and num_strict and is_enforced(tool.parameters):
                schema = strict_schema(tool.parameters).schema
                if (needed := num_unions(schema)) <= unions:
                    num_strict -= 1
                    unions -= needed
                    fields |= {"input_schema": schema, "strict": True}
            yield fields

    def _choice(self, choice: ToolChoice, *, has_budget: bool) -> dict[str, Any]:
        """The field for the choice among the tools. A model that reasons with a budget cannot be made to call
        one."""
        if choice.mode == "none":
            return {"tool_choice": {"type": "none"}}
        if choice.mode == "required" and (has_budget or not self._facts.required_calls):
            why = " while it reasons" if self._facts.required_calls else ""
            raise NotSupported(
                f"{self._model} cannot be made to call a tool{why}: ask for it in the prompt", param="choice"
            )
        kind = "auto" if choice.mode == "auto" else "any" if choice.name is None else "tool"
        fields: dict[str, Any] = {"type": kind}
        if choice.name is not None:
            fields["name"] = choice.name
        if not choice.parallel:
            fields["disable_parallel_tool_use"] = True
        return {} if fields == {"type": "auto"} else {"tool_choice": fields}


class _Prompt(NamedTuple):
    """The messages of a request.

    Attributes:
        nodes: The messages.
        lead: White space after the text that is continued, which is left out of the request. The answer is
            expected to begin with it.
        continues: The answer continues the last message.
    """

    nodes: list[MessageNode]
    lead: str = ""
    continues: bool = False


class _Constrained(NamedTuple):
    """The ``format`` of the output, and the function that takes the text out of the answer."""

    format: dict[str, Any] | None = None
    unwrap: Unwrap | None = None


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema}


@functools.lru_cache(maxsize=64)
def _output_schema(source: str, max_unions: int) -> StrictSchema:
    """A map asks for one schema many times."""
    return output_schema(msgspec.json.decode(source), max_unions)


def _chosen(text: str) -> str:
    """The choice in an answer. An answer that was cut is returned unchanged, which is no choice."""
    inner = unwrapped(text)
    try:
        return msgspec.json.decode(inner, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return inner


def _system_part(node: MessageNode) -> PromptPart:
    return PromptPart(_encode({"type": "text", "text": node.message.content}), b"}", is_head=True)


def _blocks(message: Message) -> list[dict[str, Any]]:
    """The texts and images of a message, without blank texts."""
    blocks: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, str):
            blocks += [{"type": "text", "text": part}] if part.strip() else []
            continue
        assert isinstance(part, Image), "the model reads no videos"
        if part.is_file:
            source = {"type": "base64", "media_type": part.media_type, "data": slot(part)}
            blocks.append({"type": "image", "source": source})
        else:
            blocks.append({"type": "image", "source": {"type": "url", "url": part.source}})
    return blocks


def _encoded(message: Message) -> bytes:
    """A message as the API takes it, of a tool the block with its result. Empty if it has no content: the API
    refuses blocks without text."""
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id or ""}
        if message.images:
            return _encode(result | {"content": _blocks(message)})
        return _encode(result | ({"content": message.content} if message.content else {}))
    blocks = _blocks(message)
    blocks += [call_block(call) for call in message.tool_calls]
    return _encode({"role": message.role, "content": blocks}) if blocks else b""
