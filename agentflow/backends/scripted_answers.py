"""Converts an answer of a script into the text of a generation, or into a reply with tool calls.

A text ends where the parameters of the gen end it, and must satisfy the constraint.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agentflow.errors import BadArgument, ScriptMismatch
from agentflow.language.typed.json_form import json_text
from agentflow.language.typed.replies import Reply
from agentflow.language.typed.tags import matches_whole, split_at_tags
from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.sampling import SamplingParams
from agentflow.protocol.text.stop_pattern import StopPattern

CHARS_PER_TOKEN = 4
"""About the length of a model's tokens: a ``stop_regex`` may use processor time for each token."""

ScriptedAnswer: TypeAlias = Any


def make_reply(answer: ScriptedAnswer) -> Reply:
    if isinstance(answer, Reply):
        return answer
    calls = _calls_in(answer)
    return Reply("", calls) if calls else Reply(make_text(answer))


def _calls_in(answer: ScriptedAnswer) -> tuple[ToolCall, ...]:
    """The tool calls, if the answer consists of tool calls."""
    calls = answer if isinstance(answer, list | tuple) else (answer,)
    return tuple(calls) if all(isinstance(call, ToolCall) for call in calls) else ()


def make_text(answer: object) -> str:
    if isinstance(answer, str):
        return str(answer)
    if calls := _calls_in(answer):
        answer = [{"name": call.name, "arguments": call.arguments} for call in calls]
    try:
        return json_text(answer)
    except ValueError as error:
        raise BadArgument(
            f"the script answers {answer!r}: an answer must be a text, a value that JSON can represent, or "
            f"an exception ({error})"
        ) from None


def stopped(answer: str, params: SamplingParams) -> tuple[str, str]:
    if params.stop or params.stop_regex is not None:
        end = _stop_in(answer, params, len(" ".join(answer.split(" ")[: params.min_tokens])))
        if end is not None:
            return answer[:end], "stop"
    return answer, "eos"


def _stop_in(answer: str, params: SamplingParams, first: int) -> int | None:
    """The start of the stop that is complete first among the stops that begin at ``first`` or later."""
    pattern = None if params.stop_regex is None else StopPattern(params.stop_regex)
    if pattern is not None:
        pattern.skip(answer[:first])
    for start in range(first, len(answer), CHARS_PER_TOKEN):
        token = answer[start : start + CHARS_PER_TOKEN]
        if pattern is not None:
            pattern.add(token)  # and extends its limit of processor time
        for end in range(start + 1, start + len(token) + 1):
            begins = [end - len(stop) for stop in params.stop if answer.endswith(stop, first, end)]
            found = None if pattern is None else pattern.step()
            if found is not None:
                begins.append(found)
            if begins:
                return min(begins)
    return None


def scripted_probabilities(
    questions: Sequence[Question], answers: ScriptedAnswer, name: str
) -> tuple[tuple[float, ...], ...]:
    """The probabilities of the possible answers to each question. ``ScriptMismatch`` for other answers."""
    if not isinstance(answers, Mapping) or set(answers) != {question.name for question in questions}:
        asked = ", ".join([repr(question.name) for question in questions])
        raise ScriptMismatch(
            f"the script answers {answers!r}{for_name(name)}, and not the questions {asked} by name"
        )
    return tuple([_probabilities(question, answers[question.name]) for question in questions])


def _probabilities(question: Question, answer: ScriptedAnswer) -> tuple[float, ...]:
    given = answer if isinstance(answer, Mapping) else {answer: 1.0}
    by_text = {_answer_text(one): float(probability) for one, probability in given.items()}
    if not set(by_text) <= set(question.answers):
        raise ScriptMismatch(
            f"the script answers {answer!r} to {question.name!r}, which is none of {list(question.answers)}"
        )
    return tuple([by_text.get(text, 0.0) for text in question.answers])


def _answer_text(answer: object) -> str:
    if isinstance(answer, enum.Enum):  # as the question has it
        return answer.value if isinstance(answer.value, str) else answer.name
    return ("no", "yes")[answer] if isinstance(answer, bool) else str(answer)


def check_satisfied(constraint: Constraint, answer: str, name: str) -> None:
    try:
        is_satisfied = _is_satisfied(constraint, answer)
    except BadArgument:  # a ValueError, too: the constraint itself is invalid
        raise
    except (ValueError, RecursionError):
        is_satisfied = False
    if not is_satisfied:
        raise ScriptMismatch(
            f"the script answers {answer!r}{for_name(name)}, which violates the {constraint.kind} constraint"
        )


def _is_satisfied(constraint: Constraint, answer: str) -> bool:
    match constraint.kind:
        case "choices":
            return answer in constraint.choices
        case "regex":
            return matches_whole(constraint.source, answer)
        case "schema":
            json.loads(answer)
        case "tags":
            split_at_tags(answer, constraint.tags())
        case "grammar":
            pass
    return True


def for_name(name: str) -> str:
    return f" for {name!r}" if name else ""
