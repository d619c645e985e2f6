"""A select by the log-probabilities of one token.

An API reports the likeliest tokens at each position. If each choice is one of them, their log-probabilities
are the scores of the choices, as exact as an engine's. Otherwise the model is made to write a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.backends.apis.answers.answer import TokenInfo

MAX_CHOICE_CHARS = 20
"""The length of a choice that may be one token."""
UNKNOWN_SCORE = -100.0
"""The score of a choice that the model did not write, where no probabilities are known."""
_METHODS = ("token_length_normalized", "greedy_token_selection", "likelihood")
"""The methods whose score of a choice of one token is the token's log-probability."""


def may_be_tokens(choices: Sequence[str], method: str, most: int) -> bool:
    """Whether each choice may be among the ``most`` likeliest tokens."""
    if len(choices) > most or method not in _METHODS or max(map(len, choices)) > MAX_CHOICE_CHARS:
        return False
    # The likelihood of a choice with which another begins also counts whether the text ends there.
    return method != "likelihood" or not any(
        other != choice and other.startswith(choice) for choice in choices for other in choices
    )


def exact_scores(tokens: Sequence[TokenInfo], choices: Sequence[str]) -> tuple[float, ...] | None:
    """The scores of choices that are single tokens; None if one of them is not among the likeliest.

    Args:
        tokens: The tokens of an answer; only the first counts.
        choices: The choices.
    """
    if not tokens:
        return None
    known = {top.text: top.logprob for top in tokens[0].top}
    known.setdefault(tokens[0].text, tokens[0].logprob)
    if not all(choice in known for choice in choices):
        return None
    return tuple([known[choice] for choice in choices])


def written_scores(written: str, choices: Sequence[str]) -> tuple[float, ...]:
    """The scores of the choices if the model wrote ``written``."""
    return tuple([0.0 if choice == written else UNKNOWN_SCORE for choice in choices])
