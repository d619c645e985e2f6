"""The scripted backend cuts its answers as a model's would be cut, and says what it cannot do."""

import pytest

import agentflow as af

pytestmark = pytest.mark.anyio

ANSWER = "one two three, four. Five six: seven"


async def cut(**options) -> tuple[str, str]:
    """The answer under these options, and why it ended."""
    async with af.session(backend=af.Scripted([ANSWER])) as flow, flow.state() as s:
        s += "Count." + af.gen("x", **options)
        return await s["x"], s["x"].finish_reason


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, ANSWER, "eos"),
        ({"max_tokens": 3}, "one two three,", "length"),
        ({"stop": ","}, "one two three", "stop"),
        ({"stop": [".", ","]}, "one two three", "stop"),
        ({"stop_regex": r"[,.]"}, "one two three", "stop"),
        ({"stop_regex": r"[.:] \w"}, "one two three, four", "stop"),
        ({"stop_regex": "(?i)f"}, "one two three, ", "stop"),
        ({"stop_regex": "nine"}, ANSWER, "eos"),
        # A regex and a string: whichever is complete first.
        ({"stop_regex": "two three", "stop": "three"}, "one ", "stop"),
        ({"stop_regex": "two.*six", "stop": "three"}, "one two ", "stop"),
        # No stop begins in the first words.
        ({"stop": ",", "min_tokens": 3}, ANSWER, "eos"),
        ({"stop": [",", "."], "min_tokens": 3}, "one two three, four", "stop"),
        ({"stop_regex": "t\\w+", "min_tokens": 1}, "one ", "stop"),
        ({"stop_regex": "t\\w+", "min_tokens": 3}, ANSWER, "eos"),
        ({"min_tokens": 50}, ANSWER, "eos"),
        ({"max_tokens": 2, "stop": "three"}, "one two", "length"),
        # What only steers sampling is of no account.
        ({"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 1}, "seed": 4}, ANSWER, "eos"),
    ],
)
async def test_the_answer_is_cut(options, text, reason):
    assert await cut(**options) == (text, reason)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"top_logprobs": 3}])
async def test_log_probabilities_are_refused(options):
    with pytest.raises(af.NotSupported, match="a scripted backend has no log-probabilities"):
        await cut(**options)


async def test_a_regex_that_matches_nothing_is_refused():
    with pytest.raises(af.BadArgument, match="must not match the empty text"):
        await cut(stop_regex="a*")
