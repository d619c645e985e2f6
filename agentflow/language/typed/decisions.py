"""Typed questions of ``s.decide``, and their answers."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin

from agentflow.errors import BadArgument, error_param, short_repr
from agentflow.language.markers import MARKERS
from agentflow.language.typed.json_form import JsonRecord
from agentflow.language.typed.values import ValueType
from agentflow.protocol.decisions import MAX_OPTIONS, Option, Question, check_questions

Answers: TypeAlias = "type | range | Sequence[str] | Mapping[str, str] | Any"
"""The possible answers to a question: ``bool``; texts, perhaps with descriptions; the members of an enum or
of a ``Literal`` with texts; or the numbers of a range, from the lowest to the highest."""


@dataclass(frozen=True, slots=True)
class Decision(JsonRecord):
    """The answer to a question of ``s.decide``.

    Attributes:
        value: The likeliest answer; None if the model refused the question.
        probabilities: The probability of each possible answer.
        mean: The mean of the answers, weighted by their probabilities: of the numbers of a range, or of the
            indexes of ordered texts. None for other questions.

    >>> decisions = await s.decide({"related": bool, "depth": range(1, 4)})
    >>> decisions["related"].value, round(decisions["related"].probability, 2)
    (True, 1.0)
    """

    value: Any
    probabilities: Mapping[Any, float]
    mean: float | None = None

    @property
    def probability(self) -> float:
        """The probability of the value; 0 if there is none."""
        return max(self.probabilities.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """A question with its possible answers. Made by ``af.question``."""

    instructions: str
    answers: Answers
    is_ordered: bool = False


def question(instructions: str, answers: Answers, *, ordered: bool = False) -> TypedQuestion:
    """A question for ``s.decide`` with its wording.

    Args:
        instructions: The question, or a statement that is true or false.
        answers: The possible answers: ``bool``; texts, or a mapping of texts to their descriptions; an enum
            or a ``Literal`` of texts; or a range of numbers, from the lowest to the highest.
        ordered: The texts are levels, from the lowest to the highest.

    Raises:
        BadArgument: The answers are of another kind.

    >>> tone = af.question("How does the customer sound?", {"calm": "states facts", "angry": "insults"})
    >>> decisions = await s.decide({"tone": tone})
    >>> decisions["tone"].value
    'calm'
    """
    if not isinstance(instructions, str) or not instructions.strip():
        raise BadArgument("question: the first argument must be the question, a text", param="instructions")
    asked = TypedQuestion(instructions, answers, ordered)
    _form("question", asked)
    return asked


@dataclass(frozen=True, slots=True)
class _Form:
    """A question for the backend. ``values``: of its answers, in their order. ``numbers``: of these, for the
    mean."""

    asked: Question
    values: tuple[Any, ...]
    numbers: tuple[float, ...] = ()

    def read(self, found: Mapping[str, Any] | None) -> Decision:
        """The decision, from its notation."""
        if found is None:
            return Decision(None, {})
        by_text = found["probabilities"]
        probabilities = [by_text[text] for text in self.asked.answers]
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        mean = None
        if self.numbers:
            mean = sum([number * p for number, p in zip(self.numbers, probabilities, strict=True)])
        return Decision(self.values[best], dict(zip(self.values, probabilities, strict=True)), mean)


def decisions_type(
    questions: Mapping[str, TypedQuestion | Answers],
) -> tuple[tuple[Question, ...], ValueType]:
    """The questions for the backend, and the type of the value: a dictionary of decisions by name.
    ``BadArgument`` for questions that cannot be asked."""
    if not isinstance(questions, Mapping) or not all(isinstance(name, str) for name in questions):
        raise BadArgument(
            'decide: give the questions by name, as in {"spam": bool, "tone": ["calm", "angry"]}',
            param="questions",
        )
    forms = {
        name: _form(name, one if isinstance(one, TypedQuestion) else TypedQuestion("", one))
        for name, one in questions.items()
    }
    asked = tuple([form.asked for form in forms.values()])
    check_questions(asked)
    fixed = [
        text for one in asked for text in (one.instructions, *[o.text + o.description for o in one.options])
    ]
    MARKERS.reject([*questions, *fixed], "decide: a question", "questions")

    def read(text: str) -> dict[str, Decision]:
        found = json.loads(text)
        return {name: form.read(found[name]) for name, form in forms.items()}

    return asked, ValueType("decisions", None, read)


def _form(name: str, question: TypedQuestion) -> _Form:
    answers, instructions = question.answers, question.instructions
    with error_param("questions"):
        if answers is bool:
            return _Form(Question(name, "predicate", instructions), (True, False))
        if isinstance(answers, range):
            # One more than may be asked for is enough to be refused: a range may be far longer than memory.
            numbers = tuple(sorted(answers[: MAX_OPTIONS + 1]))
            options = tuple([Option(str(number)) for number in numbers])
            return _Form(Question(name, "score", instructions, options), numbers, numbers)
        options, values = _options(name, answers)
        if question.is_ordered:
            indexes = tuple(map(float, range(len(values))))
            return _Form(Question(name, "score", instructions, options), values, indexes)
        return _Form(Question(name, "choice", instructions, options), values)


def _options(name: str, answers: Answers) -> tuple[tuple[Option, ...], tuple[Any, ...]]:
    if isinstance(answers, type) and issubclass(answers, enum.Enum):
        values: tuple[Any, ...] = tuple(answers)
        texts = [member.value if isinstance(member.value, str) else member.name for member in answers]
        return tuple(map(Option, texts)), values
    if get_origin(answers) is Literal:
        answers = get_args(answers)
    if isinstance(answers, Mapping):
        pairs = list(answers.items())
    elif isinstance(answers, Sequence) and not isinstance(answers, str | bytes):
        pairs = [(text, "") for text in answers]
    else:
        pairs = []
    if not pairs or not all(isinstance(text, str) and isinstance(shown, str) for text, shown in pairs):
        raise BadArgument(
            f"decide: the answers to {name!r} must be bool, texts, an enum, a Literal of texts or a "
            f"range of numbers, not {short_repr(answers)}"
        )
    return tuple([Option(text, shown) for text, shown in pairs]), tuple([text for text, _ in pairs])
