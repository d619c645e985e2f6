"""Questions about a state, decided by a model behind an API.

OpenAI's endpoint for decisions answers all questions in one request. Elsewhere each question is one request
for one token: each possible answer has a letter, whose log-probability counts for the answer.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from agentflow.backends.apis.answers.answer import TokenInfo
from agentflow.backends.apis.answers.reported_usage import usage_in
from agentflow.backends.apis.generation.conversation import call_item
from agentflow.errors import ProtocolError
from agentflow.protocol.chat import Message
from agentflow.protocol.decisions import Option, Question, compute_probabilities
from agentflow.protocol.events import Usage

PATH = "decisions"
MAX_AT_ONCE = 32
"""The most concurrent requests of one decide."""
LETTERS = string.ascii_uppercase
ROUNDING = 1e-3
"""How much a probability may be outside of 0 to 1."""

_encode = msgspec.json.Encoder().encode


def lettered_text(question: Question) -> str:
    """The question as a text whose answer is one letter."""
    asked = f"{question.wording}\nIs this true?" if question.is_statement else question.wording
    options = question.options or [Option(answer) for answer in question.answers]
    listed = [f"{letter}) {option.shown}" for letter, option in zip(LETTERS, options, strict=False)]
    order = "\nThe answers go from the lowest to the highest." if question.kind == "score" else ""
    return (
        f"{asked}\n" + "\n".join(listed) + f"{order}\nAnswer with the letter of one answer, and nothing else."
    )


def letter_probabilities(tokens: Sequence[TokenInfo], num_answers: int) -> tuple[float, ...] | None:
    """The probabilities of the answers from the likeliest tokens after a ``lettered_text``. An answer whose
    letter is not among these has the probability 0. None if no letter is."""
    if not tokens:
        return None
    logprobs = [-math.inf] * num_answers
    known = [(top.text, top.logprob) for top in tokens[0].top] or [(tokens[0].text, tokens[0].logprob)]
    for text, logprob in known:
        place = LETTERS.find(text.strip()) if len(text.strip()) == 1 else -1
        if 0 <= place < num_answers:  # " A" and "A" are both the answer
            logprobs[place] = _log_sum(logprobs[place], logprob)
    return compute_probabilities(logprobs) if max(logprobs) > -math.inf else None


def _log_sum(first: float, second: float) -> float:
    most = max(first, second)
    return most + math.log(math.exp(first - most) + math.exp(second - most))


def request_body(
    model: str, messages: Sequence[Message], questions: Sequence[Question], key: str | None
) -> bytes:
    """The request to the endpoint. ``key``: of the prompt cache."""
    fields: dict[str, Any] = {
        "model": model,
        "input": [item for message in messages for item in _items(message)],
        "questions": [_question(question) for question in questions],
    }
    if key is not None:
        fields["prompt_cache_key"] = key
    return _encode(fields)


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        result = {"call_id": message.tool_call_id or "", "output": message.content}
        return [{"type": "function_call_output", **result}]
    has_text = message.content or not message.tool_calls
    said = [{"role": message.role, "content": message.content}] if has_text else []
    return said + [call_item(call) for call in message.tool_calls]


def _question(question: Question) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": question.kind,
        "name": question.name,
        "instructions": question.wording,
    }
    if question.kind != "predicate":
        list_name, text_name = ("choices", "value") if question.kind == "choice" else ("levels", "label")
        fields[list_name] = [
            {text_name: option.text} | ({"description": option.description} if option.description else {})
            for option in question.options
        ]
    return fields


_Share = Annotated[float, msgspec.Meta(ge=-ROUNDING, le=1 + ROUNDING)]


class _Probability(msgspec.Struct):
    probability: _Share
    value: str | bool | int | None = None
    label: str | None = None


class _Answer(msgspec.Struct):
    type: str
    probability: _Share | None = None
    probabilities: list[_Probability] = []


class _Decisions(msgspec.Struct):
    answers: list[_Answer]
    usage: Any = None


def read_answers(
    found: Any, questions: Sequence[Question], server: str, guess: Usage
) -> tuple[tuple[tuple[float, ...] | None, ...], Usage]:
    """The probabilities in the endpoint's answer, and the usage, or parts of ``guess``. ``ProtocolError`` if
    it does not answer the questions."""
    try:
        decisions = msgspec.convert(found, _Decisions)
        answers = [
            _probabilities(question, answer)
            for question, answer in zip(questions, decisions.answers, strict=True)
        ]
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise ProtocolError(f"{server} answered decisions that are not of its API ({error})") from error
    usage, written_tokens = usage_in(decisions.usage, guess)
    return tuple(answers), msgspec.structs.replace(usage, written_tokens=written_tokens)


def _probabilities(question: Question, answer: _Answer) -> tuple[float, ...] | None:
    if answer.type == "refusal":
        return None
    if answer.type != question.kind:
        raise ValueError(f"question {question.name!r} is a {question.kind}, and its answer a {answer.type}")
    if question.kind == "predicate":
        if answer.probability is None:
            raise ValueError(f"question {question.name!r} has no probability")
        share = _within_bounds(answer.probability)
        return share, 1.0 - share
    by_text = {
        str(one.value if one.label is None else one.label): _within_bounds(one.probability)
        for one in answer.probabilities
    }
    return tuple([by_text[text] for text in question.answers])


def _within_bounds(probability: float) -> float:
    return min(max(probability, 0.0), 1.0)
