"""The parts of a chain, which are wired or run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.runnables.passthrough import RunnableAssign

from agentflow.integrations import ModelConnection
from langchain_agentflow.chat_model import ChatAgentflow
from langchain_agentflow.llm import Agentflow
from langchain_agentflow.structured_output import JsonValue, reject_truncated

_MESSAGE_TEMPLATES: Final = (HumanMessagePromptTemplate, AIMessagePromptTemplate, SystemMessagePromptTemplate)


class UnwiredPart(NamedTuple):
    """A part of a chain that runs in this process, and the reason."""

    part: Runnable[Any, Any]
    reason: str


def bare(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The part without its name and tags, which only matter for its run in callbacks."""
    while (
        isinstance(part, RunnableBinding)
        and not part.kwargs
        and not part.config_factories
        and part.config.keys() <= {"run_name", "tags", "metadata"}
    ):
        part = part.bound
    return part


def is_parser(part: Runnable[Any, Any]) -> bool:
    """Whether it reads one answer, and runs when its value is needed."""
    is_check = isinstance(part, RunnableGenerator) and getattr(part, "_transform", None) is reject_truncated
    return is_check or isinstance(part, BaseOutputParser | BaseGenerationOutputParser)


def item_getter(part: Runnable[Any, Any]) -> Callable[[Any], Any] | None:
    """The ``itemgetter`` of a function."""
    function = getattr(part, "func", None) if isinstance(part, RunnableLambda) else None
    return function if isinstance(function, itemgetter) else None


def unwired_parts(part: Runnable[Any, Any], *, is_last: bool) -> Iterator[UnwiredPart]:
    """The parts that run in this process. ``is_last``: whether the value is part of the chain's result."""
    part = bare(part)
    match part:
        case RunnableSequence(steps=steps):
            wired_parsers = _structured(steps)
            for index, step in enumerate(steps):
                if index not in wired_parsers:
                    yield from unwired_parts(step, is_last=is_last and index == len(steps) - 1)
        case RunnableParallel(steps__=branches):
            for branch in branches.values():
                yield from unwired_parts(branch, is_last=is_last)
        case RunnableAssign(mapper=mapper):
            yield from unwired_parts(mapper, is_last=is_last)
        case RunnablePassthrough(func=None, afunc=None) | RunnablePick():
            pass
        case _ if (
            type(part) is StrOutputParser or wired_model(part) is not None or item_getter(part) is not None
        ):
            pass
        case _ if is_parser(part):
            if not is_last:
                yield UnwiredPart(part, "later steps need its value, which is not a text")
        case BasePromptTemplate():
            if not is_fillable(part):
                yield UnwiredPart(part, "only templates with f-strings, of a text or of messages, are wired")
        case BaseLanguageModel():
            yield UnwiredPart(part, "the model, or an option of it, is not one of agentflow's")
        case RunnablePassthrough():
            yield UnwiredPart(part, "its function runs in this process")
        case _:
            yield UnwiredPart(part, f"{type(part).__name__} has no counterpart in the backend")


def _structured(steps: Sequence[Runnable[Any, Any]]) -> set[int]:
    """The indices of parsers of structured answers whose next step, a template, needs only texts."""
    found: set[int] = set()
    for index in range(1, len(steps) - 2):
        check, parser, template = map(bare, steps[index : index + 3])
        model = wired_model(steps[index - 1])
        if (
            model is not None
            and is_parser(check)
            and isinstance(parser, JsonValue)
            and is_fillable(template)
            and set(template.input_variables) <= set(text_properties(model))  # type: ignore[attr-defined]
        ):
            found |= {index, index + 1}
    return found


def connections_in(part: Runnable[Any, Any]) -> Iterator[ModelConnection]:
    part = bare(part)
    match part:
        case RunnableSequence(steps=steps):
            for step in steps:
                yield from connections_in(step)
        case RunnableParallel(steps__=branches):
            for branch in branches.values():
                yield from connections_in(branch)
        case RunnableAssign(mapper=mapper):
            yield from connections_in(mapper)
        case _:
            model = wired_model(part)
            if model is not None:
                yield model.connection


class WiredModel(NamedTuple):
    """A model of the chain, with the arguments that are bound to it."""

    model: ChatAgentflow | Agentflow
    kwargs: Mapping[str, Any]

    @property
    def connection(self) -> ModelConnection:
        return self.model.connection(self.kwargs.get("model") or self.kwargs.get("model_name"))


def wired_model(part: Runnable[Any, Any]) -> WiredModel | None:
    """The model, if its calls can be wired."""
    model, kwargs = bare(part), dict[str, Any]()
    while isinstance(model, RunnableBinding) and not model.config and not model.config_factories:
        kwargs = {**model.kwargs, **kwargs}
        model = bare(model.bound)
    for name in ("ls_structured_output_format", "structured_output_format"):  # for tracers
        kwargs.pop(name, None)
    if type(model) not in (ChatAgentflow, Agentflow):
        return None
    assert isinstance(model, ChatAgentflow | Agentflow)
    is_cached = model.cache or (model.cache is None and get_llm_cache() is not None)
    is_plain = not (is_cached or model.callbacks or getattr(model, "rate_limiter", None))
    is_plain &= getattr(model, "output_version", None) in (None, "v0")
    return WiredModel(model, kwargs) if is_plain and (kwargs.get("n") or model.n) == 1 else None


def is_fillable(template: Runnable[Any, Any]) -> bool:
    """Whether the template's text can contain references."""
    if type(template) is PromptTemplate:
        return template.template_format == "f-string"
    return type(template) is ChatPromptTemplate and all(
        isinstance(message, BaseMessage | MessagesPlaceholder)
        or (type(message) in _MESSAGE_TEMPLATES and is_fillable(message.prompt))  # type: ignore[union-attr]
        for message in template.messages
    )


def text_properties(model: WiredModel) -> list[str]:
    """The properties of a structured answer that are always texts."""
    schema = model.kwargs.get("schema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return []
    properties = schema.get("properties", {})
    return [
        name
        for name in schema.get("required", ())
        if "." not in name and name in properties and properties[name].get("type") == "string"
    ]
