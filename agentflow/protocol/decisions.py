"""Questions about a state, whose answers are probabilities: statements, choices and levels.

The kinds are the same as in OpenAI's decisions API. ``question_text`` asks a model that only continues text,
and ``answers_text`` is the notation of the answers as the value of a variable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from agentflow.errors import BadArgument, error_param

QuestionKind = Literal["predicate", "choice", "score"]

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_QUESTION_CHARS = 400_000
"""The characters of all questions that are asked together, with their options."""
_YES, _NO = "yes", "no"


class Option(msgspec.Struct, frozen=True, omit_defaults=True):
    """A choice, or a level of a score."""

    text: str
    description: str = ""

    @property
    def shown(self) -> str:
        """The text with its description."""
        return f"{self.text}: {self.description}" if self.description else self.text


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question. A ``predicate`` is true or false and has no options, a ``choice`` has options in any order,
    and a ``score`` has levels from the lowest to the highest. ``instructions``: by default the name."""

    name: str
    kind: QuestionKind
    instructions: str = ""
    options: tuple[Option, ...] = ()

    @property
    def wording(self) -> str:
        """The question itself: the instructions, or else the name."""
        return self.instructions or self.name

    @property
    def is_statement(self) -> bool:
        """Whether it is a predicate that is worded as a statement."""
        return self.kind == "predicate" and not self.wording.rstrip().endswith("?")

    @property
    def answers(self) -> tuple[str, ...]:
        """The texts of the possible answers, in the order of their probabilities."""
        return (_YES, _NO) if self.kind == "predicate" else tuple([option.text for option in self.options])


def check_questions(questions: Sequence[Question]) -> None:
    """Raises ``BadArgument`` for questions that cannot be asked together."""
    with error_param("questions"):
        if not 1 <= len(questions) <= MAX_QUESTIONS:
            raise BadArgument(f"decide: 1 to {MAX_QUESTIONS} questions, not {len(questions):,}")
        names = [question.name for question in questions]
        if not all(names) or len(set(names)) < len(names):
            raise BadArgument("decide: each question needs a name that no other question has")
        num_chars = 0
        for question in questions:
            least, most = (0, 0) if question.kind == "predicate" else (2, MAX_OPTIONS)
            if not least <= len(question.options) <= most:
                raise BadArgument(
                    f"decide: question {question.name!r} ({question.kind}) has {len(question.options)} "
                    f"options, not {least} to {most}"
                )
            if not all(question.answers) or len(set(question.answers)) < len(question.answers):
                raise BadArgument(
                    f"decide: question {question.name!r} needs options that are not empty, each of them once"
                )
            num_chars += len(question_text(question))
        if num_chars > MAX_QUESTION_CHARS:
            raise BadArgument(
                f"decide: the questions have {num_chars:,} characters; the limit is "
                f"{MAX_QUESTION_CHARS:,}: ask fewer at once"
            )


def question_text(question: Question) -> str:
    """The question as a text for the model, which then answers with one of ``question.answers``.

    The answers stand before the wording: questions with the same answers then begin with the same tokens,
    which are computed once."""
    if question.kind == "predicate":
        if question.is_statement:
            return f"Answer yes or no: is this statement true?\nStatement: {question.wording}"
        return f"Answer yes or no.\nQuestion: {question.wording}"
    order = ", from the lowest to the highest" if question.kind == "score" else ""
    listed = "\n".join([f"- {option.shown}" for option in question.options])
    noun = "levels" if question.kind == "score" else "choices"
    return f"Answer with one of these {noun}{order}:\n{listed}\nQuestion: {question.wording}"


def compute_probabilities(logprobs: Sequence[float]) -> tuple[float, ...]:
    """The probabilities of answers, one of which is given, from their log-probabilities."""
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    total = sum(weights)
    return tuple([weight / total for weight in weights])


def answers_text(questions: Sequence[Question], found: Sequence[Sequence[float] | None]) -> str:
    """The answers as a JSON object: for each question by name its likeliest ``value`` (of a predicate true or
    false) and the ``probabilities`` by answer; null for a question that the model refused."""
    answers: dict[str, object] = {}
    for question, probabilities in zip(questions, found, strict=True):
        if probabilities is None:
            answers[question.name] = None
            continue
        texts = question.answers
        value: str | bool = texts[probabilities.index(max(probabilities))]
        if question.kind == "predicate":
            value = value == _YES
        answers[question.name] = {
            "value": value,
            "probabilities": dict(zip(texts, probabilities, strict=True)),
        }
    return msgspec.json.encode(answers).decode()  # in a quarter of the time of ``json``
