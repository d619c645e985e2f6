"""``POST /v1/decisions``: answers to questions about an input, with probabilities, as in OpenAI's API. All
questions are one tree of tokens after the input (``engine/generator/decide``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.chat import Conversation, Message
from agentflow.protocol.decisions import MAX_OPTIONS, MAX_QUESTIONS, Option, Question, check_questions
from agentflow.protocol.events import Capabilities
from agentflow.protocol.ops import MAX_SALT_CHARS
from agentflow.runtime.generator import Decided
from agentflow.server.compatible.field_errors import naming_field, naming_param
from agentflow.server.compatible.fields import Unread
from agentflow.server.errors import ApiError, invalid_field, unsupported
from agentflow.server.http.call import ApiCall
from agentflow.server.http.caller import caller_with
from agentflow.server.models.api_model import TenantGenerator
from agentflow.server.openai.responses.answer import make_usage
from agentflow.server.openai.responses.items import ItemReader, Turns, read_items
from agentflow.server.openai.responses.types import ResponseInput, ResponseUsage

_Text: TypeAlias = Annotated[str, Meta(min_length=1)]
_TWO_OR_MORE = Meta(min_length=2, max_length=MAX_OPTIONS)


class TextPart(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A part of a question."""

    text: str


Instructions: TypeAlias = _Text | Annotated[list[TextPart], Meta(min_length=1)]


class PredicateQuestion(
    msgspec.Struct, kw_only=True, tag_field="type", tag="predicate", forbid_unknown_fields=True
):
    """How likely a statement about the input is true."""

    instructions: Instructions
    name: _Text | None = None


class Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A possible answer: a text, or true or false."""

    value: _Text | bool
    description: str | None = None


class ChoiceQuestion(
    msgspec.Struct, kw_only=True, tag_field="type", tag="choice", forbid_unknown_fields=True
):
    """Which of the choices fits the input."""

    instructions: Instructions
    choices: Annotated[list[Choice], _TWO_OR_MORE]
    name: _Text | None = None


class Level(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A level of a score."""

    label: _Text
    description: str | None = None


class ScoreQuestion(msgspec.Struct, kw_only=True, tag_field="type", tag="score", forbid_unknown_fields=True):
    """Where the input is on a scale of levels, from the lowest to the highest."""

    instructions: Instructions
    levels: Annotated[list[Level], _TWO_OR_MORE]
    name: _Text | None = None


AskedQuestion: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Questions about an input. ``prompt_cache_key``, ``prompt_cache_options`` and ``safety_identifier`` do
    not change answers. ``cache_salt`` and ``priority`` are extensions."""

    model: str
    input: ResponseInput
    questions: Annotated[list[AskedQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]

    prompt_cache_key: str | None = None
    prompt_cache_options: Unread = None
    safety_identifier: str | None = None

    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class PredicateAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    """The probability that the statement is true."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct):
    """The probability of a choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest choice. ``confidence``: its probability."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(msgspec.Struct):
    """The probability of a level. ``value``: its index, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    """The mean index of the levels, weighted by their probabilities. ``confidence``: the highest
    probability."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class RefusalAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    """A model behind an API did not answer the question."""

    name: str | None


class DecisionAnswer(msgspec.Struct, kw_only=True):
    """The answers in the order of the questions."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer]
    model: str
    usage: ResponseUsage
    object: Literal["decision"] = "decision"


async def create_decision(call: ApiCall) -> None:
    """Answers questions about one input."""
    body = await call.process(call.read, DecisionRequest)
    generator = call.text_generator(body.model, body, priority=body.priority)
    messages = await call.process(_make_messages, body, generator.capabilities.model)
    questions = await call.process(_make_questions, body)
    if isinstance(generator, TenantGenerator):
        decided = await _decided_by_api(generator, body, messages, questions)
    else:
        decided = await _decided_by_engine(call, generator, body, messages, questions)
    call.record.count(decided.usage)
    answers = [
        _answer(asked, probabilities)
        for asked, probabilities in zip(body.questions, decided.probabilities, strict=True)
    ]
    await call.reply(
        DecisionAnswer(answers=answers, model=generator.capabilities.model, usage=make_usage(decided.usage))
    )


async def _decided_by_engine(
    call: ApiCall,
    generator: EngineGenerator,
    body: DecisionRequest,
    messages: tuple[Message, ...],
    questions: Sequence[Question],
) -> Decided:
    most = call.service.http_limits.max_prompt_tokens
    with naming_field(generator, "input"):
        await generator.requests.check_texts([message.content for message in messages], most)
        context = generator.open(
            body.cache_salt or "",
            priority=body.priority or 0,
            patience_s=generator.patience_s,
            trace=call.trace,
            max_tokens=most,
        )
        try:
            caller_with(call.caller, cache_key=body.prompt_cache_key).advise(generator, context)
            await generator.fill_conversation(context, Conversation(messages), opens_turn=False)
            if context.tokens.last_turn[1]:  # the assistant's turn, which a completion would continue
                generator.end_role(context)
            return await generator.decide(context, questions, max_tokens=most)
        finally:
            generator.free(context)


async def _decided_by_api(
    generator: TenantGenerator,
    body: DecisionRequest,
    messages: tuple[Message, ...],
    questions: Sequence[Question],
) -> Decided:
    model = generator.capabilities.model
    if not generator.capabilities.decisions:
        raise ApiError(400, "unsupported", f"{model} is behind an API that scores no answers", "model")
    context = generator.open(body.cache_salt or "")
    try:
        for message in messages:
            if message.role == "tool" or message.tool_calls:
                raise unsupported("input", f"{model} is behind an API: send messages without function calls")
            generator.begin_role(context, message.role)
            generator.fill(context, message.content)
            generator.end_role(context)
        return await generator.decide(context, questions)
    finally:
        generator.free(context)


def _make_messages(body: DecisionRequest, model: str) -> tuple[Message, ...]:
    items = read_items(body.input)
    if not items:
        raise invalid_field("input", "it is empty: give a text or at least one item")
    # Decisions are made about texts.
    reader = ItemReader(Capabilities(model), lambda item_id: None, takes_json=True)
    turns = Turns(())
    for number, raw in enumerate(items):
        turns.add(reader.read(raw, f"input[{number}]"), f"input[{number}]")
    return Conversation(tuple(turns.messages)).check().messages


def _make_questions(body: DecisionRequest) -> list[Question]:
    questions = [_question(number, asked) for number, asked in enumerate(body.questions)]
    with naming_param("questions"):
        check_questions(questions)
    return questions


def _question(number: int, asked: AskedQuestion) -> Question:
    instructions = asked.instructions
    if not isinstance(instructions, str):
        instructions = "".join([part.text for part in instructions])
    param, name = f"questions[{number}]", f"{number}"
    if not instructions.strip():
        raise invalid_field(f"{param}.instructions", "it is empty: give the question or statement")
    match asked:
        case PredicateQuestion():
            return Question(name, "predicate", instructions)
        case ChoiceQuestion():
            field, shown = "choices", [(_text(one.value), one.description) for one in asked.choices]
            if len({text for text, _ in shown}) < len(shown):  # such as "true" and true
                shown = [(msgspec.json.encode(one.value).decode(), one.description) for one in asked.choices]
        case ScoreQuestion():
            field, shown = "levels", [(one.label, one.description) for one in asked.levels]
    if len({text for text, _ in shown}) < len(shown):
        raise invalid_field(f"{param}.{field}", "they must differ")
    options = tuple([Option(text, description or "") for text, description in shown])
    return Question(name, "choice" if field == "choices" else "score", instructions, options)


def _text(value: str | bool) -> str:
    return ("false", "true")[value] if isinstance(value, bool) else value


def _answer(
    asked: AskedQuestion, probabilities: Sequence[float] | None
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer:
    if probabilities is None:
        return RefusalAnswer(name=asked.name)
    confidence = max(probabilities)
    match asked:
        case PredicateQuestion():
            return PredicateAnswer(name=asked.name, probability=probabilities[0])
        case ChoiceQuestion():
            return ChoiceAnswer(
                name=asked.name,
                choice=asked.choices[probabilities.index(confidence)].value,
                confidence=confidence,
                probabilities=[
                    ChoiceProbability(choice.value, probability)
                    for choice, probability in zip(asked.choices, probabilities, strict=True)
                ],
            )
        case ScoreQuestion():
            return ScoreAnswer(
                name=asked.name,
                score=sum([index * probability for index, probability in enumerate(probabilities)]),
                confidence=confidence,
                probabilities=[
                    LevelProbability(index, level.label, probability)
                    for index, (level, probability) in enumerate(
                        zip(asked.levels, probabilities, strict=True)
                    )
                ],
            )
