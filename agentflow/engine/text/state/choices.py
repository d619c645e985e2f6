"""The choices of a select: their token ids, and their comparison.

The last tokens of a text depend on the following text, so each choice is encoded together with the text
before it; of a long text only the end is encoded again. Scoring begins at the first id in which two choices
differ (or with the last id of the shortest choice, if that is a prefix of the others). So a score depends on
the whole text and the other choices, but not on the division between them: ``"Answer: "`` with ``"yes"`` and
``"no"`` is equal to ``"Answer:"`` with ``" yes"`` and ``" no"``.

The scores are the three methods of SGLang's frontend (Zheng et al., 2024; its ``choices`` module), and
``likelihood``: the log-probability of the whole choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument


def mean(logprobs: Sequence[float]) -> float:
    """``token_length_normalized``: the mean log-probability of the choice's tokens."""
    return sum(logprobs) / len(logprobs)


def num_greedy_tokens(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> list[int]:
    """``greedy_token_selection``: the number of tokens for which each choice remains, if at each token only
    the choices with the likeliest next token remain. A choice that ends is dropped, unless all remaining ones
    end."""
    running = list(range(len(ids)))
    counts = [0] * len(ids)
    depth = 0
    while len(running) > 1 and any(len(ids[choice]) > depth for choice in running):
        going_on = [choice for choice in running if len(ids[choice]) > depth]
        likeliest = max(going_on, key=lambda choice: logprobs[choice][depth])
        running = [choice for choice in going_on if ids[choice][depth] == ids[likeliest][depth]]
        depth += 1
        for choice in running:
            counts[choice] = depth
    for choice in running:
        counts[choice] = max(depth, 1)
    return counts


def choices_that_begin_others(choices: Sequence[str]) -> set[int]:
    """Returns the indices of the choices with which another choice begins.

    >>> choices_that_begin_others(["12", "2", "1"])
    {2}
    """
    order = sorted(range(len(choices)), key=choices.__getitem__)  # a text comes right before its extensions
    return {one for one, after in pairwise(order) if choices[after].startswith(choices[one])}


def compute_scores(
    method: str,
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]],
) -> list[float]:
    """Returns the scores of the choices. The largest wins; among equals, the first.

    Args:
        method: how choices are scored.
        ids: the tokens of each choice.
        logprobs: their log-probabilities.
        unconditional: their log-probabilities without context, if the method needs them.
    """
    if method == "greedy_token_selection":
        counts = num_greedy_tokens(ids, logprobs)
        return [float(count) for count in counts]
    if method == "likelihood":
        return [sum(values) for values in logprobs]
    normalised = [mean(values) for values in logprobs]
    if method == "unconditional_likelihood_normalized":
        return [given - mean(alone) for given, alone in zip(normalised, unconditional, strict=True)]
    return normalised


# Up to this many characters in total are encoded completely, which takes about a millisecond.
MAX_PLAIN_CHARS = 4000
# About this many characters at the end of a longer text are encoded again with each choice.
WINDOW_CHARS = 64
_MAX_TRIED = 4


@dataclass(frozen=True, slots=True)
class EncodedChoices:
    """The state with each choice appended."""

    num_before: int  # settled ids
    text: str  # the text after them, which is encoded together with each choice
    choices: Sequence[str]
    prefix: list[int]  # the settled ids and the ids that all choices share, without any choice's last one
    ends: list[list[int]]  # the remaining ids of each choice, at least one

    def run(self, index: int) -> tuple[str, list[int]]:
        """Returns the text and the ids that one choice adds to the settled ids."""
        return self.text + self.choices[index], self.prefix[self.num_before :] + self.ends[index]


def encode_choices(
    tokenizer: Tokenizer, before: list[int], text: str, choices: Sequence[str], *, continues: bool
) -> EncodedChoices:
    """Encodes the choices after other text. That text is encoded separately only at the start of a sequence,
    if otherwise no id would precede the differing ids.

    Args:
        tokenizer: the model's tokenizer.
        before: settled ids.
        text: the text after them.
        choices: the possible next texts.
        continues: as in ``Tokenizer.encode``, for ``text``.

    Raises:
        BadArgument: the vocabulary cannot represent a choice.
    """
    head, tails = encode_after(tokenizer, text, choices, continues=continues)
    for choice, tail in zip(choices, tails, strict=True):
        if not tail:
            raise BadArgument(
                f"the model's vocabulary has no token for the choice {choice!r}", param="choices"
            )
    shortest = min([len(tail) for tail in tails])
    num_common = min(common_prefix(min(tails), max(tails)), shortest - 1)
    if text and not before and not head and not num_common:  # at least one id must precede the scored ids
        head = tokenizer.encode(text, continues=continues)
        tails = [tokenizer.encode(choice, continues=True) for choice in choices]
    prefix = before + head + tails[0][:num_common]
    return EncodedChoices(len(before), text, choices, prefix, [tail[num_common:] for tail in tails])


def encode_after(
    tokenizer: Tokenizer, text: str, choices: Sequence[str], *, continues: bool
) -> tuple[list[int], list[list[int]]]:
    """Returns the ids of ``text`` with each choice: the ids with which all begin, and the remaining ids of
    each."""
    if sum(map(len, choices)) + len(text) * len(choices) > MAX_PLAIN_CHARS:
        window = _window(tokenizer, text, continues)
        if window is not None:
            head, rest, rest_ids = window
            tails = [tokenizer.encode(rest + choice, continues=True) for choice in choices]
            # A choice must not change ids near the start of the window.
            kept = len(rest_ids) // 2
            if all(tail[:kept] == rest_ids[:kept] for tail in tails):
                return head, tails
    return [], [tokenizer.encode(text + choice, continues=continues) for choice in choices]


def _window(tokenizer: Tokenizer, text: str, continues: bool) -> tuple[list[int], str, list[int]] | None:
    """Finds the end of ``text`` to encode again. Returns the ids before it, the end, and its ids. It begins
    at a token and gets the same ids alone as in the whole text. None if there is no such place."""
    if len(text) <= 2 * WINDOW_CHARS:
        return None
    ids = tokenizer.encode(text, continues=continues)
    for place in _places(text):
        rest = text[place:]
        rest_ids = tokenizer.encode(rest, continues=True)
        num_before = len(ids) - len(rest_ids)
        if len(rest_ids) > 1 and num_before > 0 and ids[num_before:] == rest_ids:
            return ids[:num_before], rest, rest_ids
    return None


def _places(text: str) -> Iterator[int]:
    """Yields the places where a token might begin, from ``WINDOW_CHARS`` before the end backwards: before
    white space after other text or, if there are few of these, anywhere."""
    latest = len(text) - WINDOW_CHARS
    earliest = max(1, latest - WINDOW_CHARS)
    words = [n for n in range(latest, earliest, -1) if text[n].isspace() and not text[n - 1].isspace()]
    yield from (words + list(range(latest, earliest, -1)))[:_MAX_TRIED]
