"""ReAct: the tools get the model's arguments, and every loop ends."""

import operator
from collections.abc import Callable, Iterable

import pytest
import react
from hypothesis import given
from hypothesis import strategies as st
from scripted_example import Asked, in_turn, run, scripted, shown

import agentflow as af

pytestmark = pytest.mark.anyio

CONFUSED = "calculate understands numbers, + - * / and brackets only"


async def test_the_result_of_a_tool_is_the_next_prompt():
    asked = Asked(
        in_turn(
            [
                " Where?",
                "look_up",
                "Rhine]",
                " How much?",
                "calculate",
                "1233 / 9",
                " Good",
                "finish",
                "137 km",
            ]
        )
    )
    trace = await run(react.react, scripted(asked), "A ninth of the Rhine?")
    assert [(step.action, step.input, step.observation) for step in trace.steps] == [
        ("look_up", "Rhine", "The Rhine is 1233 kilometres long."),
        ("calculate", "1233 / 9", "137"),
    ]
    assert [step.thought for step in trace.steps] == ["Where?", "How much?"]
    assert trace.answer == "137 km"
    assert asked.prompts[-1] == (
        f"{react.SOLVED}Question: A ninth of the Rhine?\n"
        "Thought: Where?\nlook_up[Rhine]\nObservation: The Rhine is 1233 kilometres long.\n"
        "Thought: How much?\ncalculate[1233 / 9]\nObservation: 137\nThought: Good\nfinish["
    )


def stubborn(inputs: Iterable[str], num_calls: int) -> Callable[[str], str]:
    """Calls look_up ``num_calls`` times, regardless of the results, and then chooses to finish."""
    give = in_turn(inputs)

    def answer(prompt: str) -> str:
        own = prompt.removeprefix(react.SOLVED)
        if own.endswith("Thought:"):
            return " hm"
        if own.endswith("\n"):
            return "look_up" if own.count("Observation:") < num_calls else "finish"
        return "the end" if own.endswith("finish[") else give(prompt)

    return answer


async def test_a_call_made_twice_is_the_last():
    trace = await run(react.react, scripted(stubborn(["one", "again", "again"], 3)), "What?", max_steps=9)
    assert [step.input for step in trace.steps] == ["one", "again", "again"]
    assert all(step.observation.startswith("nothing is known") for step in trace.steps)
    assert trace.answer == "the end"


@pytest.mark.parametrize(
    ("inputs", "num_calls", "max_steps"),
    [(["again", "again"], 2, 9), ("abcd", 4, 4), ("a", 1, 1), ("", 0, 0)],
)
async def test_finish_is_the_only_choice_after_a_repeated_call_or_the_last_round(
    inputs, num_calls, max_steps
):
    trace = await run(react.react, scripted(stubborn(inputs, num_calls)), "What?", max_steps=max_steps)
    assert len(trace.steps) == num_calls
    async with af.session(backend=scripted(stubborn([*inputs, "more"], num_calls + 1))) as flow:
        with pytest.raises(af.errors.RunFailed, match=r"none of the choices \['finish'\]"):
            await flow.run(react.react, "What?", max_steps=max_steps)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 12", "444"),
        (" (1 + 2) * -3 ", "-9"),
        ("1 / 8", "0.125"),
        ("--2", "2"),
        ("7", "7"),
        ("1 / 0", CONFUSED),
        ("9 ** 9 ** 9", CONFUSED),
        ("__import__('os')", CONFUSED),
        ("1 +", CONFUSED),
        ("", CONFUSED),
        ("1, 2", CONFUSED),
        ("1(2)", CONFUSED),
        ("(" * 150, CONFUSED),
        ("1" * 201, CONFUSED),
        ("9" * 200 + "*" + "9" * 200, CONFUSED),
        ("1\x00", CONFUSED),
        ("True", CONFUSED),
    ],
)
def test_the_calculator(expression, value):
    assert react.calculate(expression) == value


@given(st.text(alphabet="0123456789 .()+-*/", max_size=60) | st.text(max_size=30))
def test_the_calculator_answers_anything(text):
    told = react.calculate(text)
    assert told == CONFUSED or isinstance(float(told), float)


NUMBERS = st.integers(0, 999).map(lambda number: (str(number), float(number)))
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(list(OPERATORS)), inner).map(
        lambda parts: (
            f"({parts[0][0]} {parts[1]} {parts[2][0]})",
            OPERATORS[parts[1]](parts[0][1], parts[2][1]),
        )
    ),
    max_leaves=8,
)


@given(SUMS)
def test_the_calculator_calculates(case):
    expression, value = case
    assert react.calculate(expression) == f"{value:g}"


@pytest.mark.parametrize(
    ("topic", "fact"),
    [("the Rhine", "rhine"), ("MONT BLANC!", "mont blanc"), ("How high is Everest", "everest")],
)
def test_the_encyclopedia_finds_a_topic_in_what_is_asked(topic, fact):
    assert react.look_up(topic) == react.FACTS[fact]


async def test_every_question_is_shown_with_its_answer():
    def answer(prompt: str) -> str:
        if prompt.endswith("\n"):
            return "finish" if prompt.count("Observation") > 4 else "look_up"
        return "Mont Blanc [sic" if prompt.endswith("look_up[") else " yes"

    page = await shown(react.main, scripted(answer))
    for question in react.QUESTIONS:
        assert question in page
    assert page.count("look_up('Mont Blanc [sic') → Mont Blanc is 4806 metres high.") == len(react.QUESTIONS)
