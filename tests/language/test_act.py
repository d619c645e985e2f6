"""The tool loop: the model's input, its order and limits; and how it ends early."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import threading
from typing import Annotated, Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PlainValidator, SecretStr, ValidationError
from support.faults import has_param
from support.observed_backends import Observed, Unbatched

import agentflow as af
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio

ERROR = "error: "


def call(name: str, **arguments: Any) -> af.ToolCall:
    return af.ToolCall(name, arguments)


def scripted(*answers: Any) -> af.Session:
    return af.session(backend=af.Scripted({"answer": list(answers)}), seed=1)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


async def answered(tools: list[Any], *calls: af.ToolCall, **options: Any) -> list[str]:
    """The results that the model gets for these calls of one reply."""
    async with scripted(calls, "done") as flow, flow.state() as s:
        s += af.user("?")
        assert await af.act(s, tools=tools, **options) == "done"
        return [m["content"] for m in await s.messages() if m["role"] == "tool"]


# The model of the loop: one call after another, and the conversation that follows.


def ok(number: int) -> int:
    return number * 2


async def slow(number: int) -> str:
    for _ in range(number % 5):
        await anyio.lowlevel.checkpoint()
    return f"slow {number}"


async def failing(number: int) -> None:
    raise ValueError(f"no {number}")


def denied(number: int) -> str:
    raise AssertionError("a denied call runs")


async def never(number: int) -> str:
    await anyio.sleep_forever()
    raise AssertionError


NAMES = ["ok", "slow", "failing", "denied", "never", "missing", "limited"]
CALLS = st.tuples(st.sampled_from(NAMES), st.one_of(st.integers(0, 9), st.just("no number")))
ROUNDS = st.lists(st.lists(CALLS, min_size=1, max_size=5), max_size=5)


def expected_results(rounds: list[Any], max_rounds: int, max_calls: int | None) -> tuple[list[Any], bool]:
    """The contents of the results of each round, and whether the loop ends with an answer."""
    found, num_runs, num_limited = [], 0, 0
    for position, calls in enumerate(rounds):
        if position + 1 == max_rounds:
            return [*found, [f"{ERROR}not run: the limit of rounds is reached"] * len(calls)], False
        texts = []
        for name, number in calls:
            if name == "missing":
                text = "missing"
            elif not isinstance(number, int):
                text = "invalid"
            elif (max_calls is not None and num_runs >= max_calls) or (
                name == "limited" and num_limited >= 2
            ):
                text = "limit"
            elif name == "denied":
                text = (
                    f"{ERROR}the call was denied: not number {number}"
                    if number
                    else f"{ERROR}the call was denied"
                )
            else:
                num_runs += 1
                num_limited += name == "limited"
                text = {
                    "ok": str(number * 2),
                    "slow": f"slow {number}",
                    "failing": f"{ERROR}no {number}",
                    "never": "took longer",
                    "limited": json.dumps({"number": number}),
                }[name]
            texts.append(text)
        found.append(texts)
    return found, True


@given(
    rounds=ROUNDS,
    max_rounds=st.integers(1, 6),
    max_calls=st.one_of(st.none(), st.integers(0, 8)),
    is_streamed=st.booleans(),
    is_batched=st.booleans(),
)
async def test_the_loop_is_that_of_the_model(rounds, max_rounds, max_calls, is_streamed, is_batched):
    async def approve(asked: af.ToolCall) -> bool | str:
        number = asked.arguments["number"]
        return asked.name != "denied" or (f"not number {number}" if number else False)

    @af.tool(max_calls=2)
    def limited(number: int) -> dict[str, int]:
        return {"number": number}

    tools = [ok, slow, failing, denied, af.tool(never, timeout_s=1e-3), limited]
    answers = [[call(name, number=number) for name, number in calls] for calls in rounds]
    backend = af.Scripted({"answer": [*answers, "the end"]})
    results, ends = expected_results(rounds, max_rounds, max_calls)
    events = []
    async with af.session(backend=backend if is_batched else Unbatched(backend)) as flow, flow.state() as s:
        s += af.system("x") + af.user("y")
        loop = af.act(s, tools=tools, max_rounds=max_rounds, max_calls=max_calls, approve=approve)
        try:
            if is_streamed:
                events = [event async for event in loop]
                assert events[-1] == af.ActDone("the end")
            else:
                assert await loop == "the end"
            assert ends
        except af.errors.LimitExceeded:
            assert not ends
        messages = await s.messages()
        s += af.user("z") + af.reply("after", tools=[ok])
        if ends:
            backend.generator._script["after"] = "fine"
            await s["after"]
    ids = itertools.count(1)
    shown = iter(messages)
    assert [next(shown)["role"] for _ in range(2)] == ["system", "user"]
    for calls, texts in zip(rounds, results, strict=False):
        said = next(shown)
        numbers = [f"call_{next(ids)}" for _ in calls]
        assert [one["id"] for one in said["tool_calls"]] == numbers
        for (name, _), number, text in zip(calls, numbers, texts, strict=True):
            message = next(shown)
            assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", number, name)
            if text.startswith((ERROR, "{")) or name in ("ok", "slow"):
                assert message["content"] == text or text in message["content"]
            else:
                assert message["content"].startswith(ERROR)
                assert text in message["content"]
    assert [message["content"] for message in shown] == (["the end"] if ends else [])
    if is_streamed and ends:
        done = [event for event in events if isinstance(event, af.ToolDone)]
        assert sorted(e.text for e in done) == sorted(m["content"] for m in messages if m["role"] == "tool")
        assert all(event.failed == event.text.startswith(ERROR) for event in done)
        assert [e.number for e in events if isinstance(e, af.RoundStarted)] == [*range(1, len(rounds) + 2)]


# Tools


class Place(BaseModel):
    city: str
    days: int = Field(1, ge=1, le=9)


@dataclasses.dataclass
class Report:
    place: Place
    dry: bool


async def test_arguments_and_results_have_the_types_of_the_function():
    async def forecast(place: Place, dry: bool = False) -> Report:
        assert isinstance(place, Place)
        return Report(place, dry)

    right, wrong = (
        call("forecast", place={"city": "Oslo"}),
        call("forecast", place={"city": "Oslo", "days": 99}),
    )
    found = await answered([forecast], right, wrong)
    assert json.loads(found[0]) == {"place": {"city": "Oslo", "days": 1}, "dry": False}
    assert found[1].startswith(ERROR)
    assert "days" in found[1]


class Shop:
    def __init__(self) -> None:
        self.sold: list[str] = []

    def buy(self, item: str) -> None:
        self.sold.append(item)

    @af.tool(name="sell")
    def sells(self, item: str) -> list[str]:
        return self.sold

    async def __call__(self, item: str) -> str:
        return item.upper()


async def test_methods_partial_functions_objects_and_renamed_functions_are_tools():
    shop = Shop()
    tools = [shop.buy, shop.sells, functools.partial(weather, city="Rome"), af.tool(shop, name="shout")]
    calls = [call("buy", item="nail"), call("shout", item="x"), call("weather")]
    assert await answered(tools, *calls) == ["null", "X", "rain in Rome"]
    assert await answered(tools, call("sell", item="")) == ['["nail"]']


async def test_a_tool_of_a_schema_gets_plain_values():
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    add = af.tool(lambda a: sum(a), name="add", description="Adds.", parameters=schema)
    backend = af.Scripted({"answer": [call("add", a=[1, 2]), "done"]})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        await af.act(s, tools=[add])
        assert (await s.messages())[-2]["content"] == "3"
    [spec] = backend.calls[0].tools
    assert (spec.name, spec.description, spec.parameters) == ("add", "Adds.", schema)


async def test_plain_functions_do_not_block_the_loop_and_calls_run_together():
    """Each waits for the other, one in a thread."""
    in_thread, in_loop = threading.Event(), anyio.Event()

    def first() -> str:
        in_thread.set()
        anyio.from_thread.run(in_loop.wait)
        return "first"

    async def second() -> str:
        await anyio.to_thread.run_sync(in_thread.wait)
        in_loop.set()
        return "second"

    assert await answered([first, second], call("first"), call("second")) == ["first", "second"]


@pytest.mark.parametrize("value", [object(), float("nan"), {1j: 2}, b"\xff"])
async def test_a_result_without_a_form_is_an_error_of_the_call(value):
    def odd() -> Any:
        return value

    [text] = await answered([odd], call("odd"))
    assert text.startswith(ERROR) == (value != b"\xff")


async def test_errors_that_could_not_be_sent_are_escaped():
    def odd() -> None:
        raise ExceptionGroup("many", [KeyError("\ud800")])

    assert await answered([odd], call("odd")) == [f"{ERROR}KeyError: '\\ud800'"]


# The hook


@pytest.mark.parametrize("is_async", [False, True])
async def test_calls_are_approved_one_after_another_in_their_order(is_async):
    asked = []

    def approve(wanted: af.ToolCall) -> bool | str:
        asked.append(wanted.arguments["city"])
        return {"a": True, "b": False, "c": "too far"}[asked[-1]]

    async def approve_async(wanted: af.ToolCall) -> bool | str:
        return approve(wanted)

    calls = [call("weather", city=city) for city in "cabbc"]
    found = await answered([weather], *calls, approve=approve_async if is_async else approve)
    assert asked == list("cabbc")
    denied = f"{ERROR}the call was denied"
    assert found == [f"{denied}: too far", "rain in a", denied, denied, f"{denied}: too far"]


@pytest.mark.parametrize("verdict", [None, 1])
async def test_a_hook_without_a_verdict_is_an_error_of_the_program(verdict):
    with pytest.raises(af.errors.BadArgument) as caught:
        await answered([weather], call("weather", city="a"), approve=lambda _: verdict)
    assert caught.value.param == "approve"


class Aliased(BaseModel):
    name: str = Field(alias="theName")


def greet(who: Aliased, times: int) -> str:
    return f"Hello {who.name}! " * times


async def test_f23j_a_hook_changes_the_arguments():
    """The changed call is validated like one of the model, and its events have the changed arguments."""

    def approve(wanted: af.ToolCall) -> dict[str, Any]:
        return {**wanted.arguments, "times": min(wanted.arguments["times"], 2)}

    calls = [call("greet", who={"theName": "Ada"}, times=9)]
    assert await answered([greet], *calls, approve=approve) == ["Hello Ada! Hello Ada! "]
    async with scripted(calls, "done") as flow, flow.state() as s:
        s += af.user("?")
        started = [
            event.call.arguments["times"]
            async for event in af.act(s, tools=[greet], approve=approve)
            if isinstance(event, af.ToolStarted)
        ]
    assert started == [2]


@pytest.mark.parametrize("changed", [{"city": 3}, {}, {"city": object()}, {"town": "a"}])
async def test_f23k_invalid_arguments_of_a_hook_are_an_error_of_the_program(changed):
    with pytest.raises(af.errors.BadArgument) as caught:
        await answered([weather], call("weather", city="a"), approve=lambda _: changed)
    assert caught.value.param == "approve"


class Plain(BaseModel):
    force: bool = True


class Options(BaseModel):
    force: bool = True
    tags: list[str] = []
    token: SecretStr = SecretStr("none")


def in_place(wanted: af.ToolCall) -> Any:
    wanted.arguments["path"] = "/tmp"
    wanted.arguments["flags"]["force"] = False
    wanted.arguments["options"].force = False
    return wanted.arguments


def in_place_and_true(wanted: af.ToolCall) -> bool:
    in_place(wanted)
    return True


def in_a_shallow_copy(wanted: af.ToolCall) -> Any:
    return dict(in_place(wanted))


@pytest.mark.parametrize("approve", [in_place, in_place_and_true, in_a_shallow_copy])
async def test_f37_arguments_that_a_hook_edits_reach_the_tool_and_its_event(approve):
    ran = []

    def delete(path: str, flags: dict[str, bool], options: Plain, depth: int = 1) -> str:
        """Deletes files."""
        ran.append({"path": path, "flags": flags, "options": options, "depth": depth})
        return "ok"

    wanted = call("delete", path="/", flags={"force": True}, options={"force": True})
    edited = {"path": "/tmp", "flags": {"force": False}, "options": Plain(force=False), "depth": 1}
    async with scripted(wanted, "done") as flow, flow.state() as s:
        s += af.user("?")
        started = []
        async for event in af.act(s, tools=[delete], approve=approve):
            if isinstance(event, af.ToolStarted):
                started.append((event.call.arguments, json.loads(event.call.text)))
    assert ran == [edited]
    assert started == [(edited, {"path": "/tmp", "flags": {"force": False}, "options": {"force": False}})]


async def test_f37_an_edit_of_a_value_without_json_is_an_error_and_no_permission():
    """A hook that edits a model with a secret: the edit cannot be written, so the call does not run."""

    def delete(options: Options) -> str:
        raise AssertionError("the call runs")

    def approve(wanted: af.ToolCall) -> bool:
        wanted.arguments["options"].force = False
        return True

    with pytest.raises(af.errors.BadArgument, match="secret"):
        await answered([delete], call("delete", options={"force": True}), approve=approve)


class Unequal:
    """Has no ``==`` and no form in JSON."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclasses.dataclass(eq=False)
class Numbered:
    name: str
    number: int = dataclasses.field(default_factory=itertools.count().__next__)


@pytest.mark.parametrize(
    "approve",
    [
        lambda _: True,
        lambda wanted: wanted.arguments,
        lambda wanted: dict(wanted.arguments),
        lambda wanted: {**copy.deepcopy(wanted.arguments), "made": wanted.arguments["made"]},
    ],
)
async def test_f37_a_hook_that_changes_nothing_keeps_the_text_of_the_model(approve):
    """Byte for byte, with its white space and its order; values that are made again each time stay too."""
    ran, shown = [], []

    def look(
        where: Options,
        numbers: set[int],
        one: Numbered,
        made: Annotated[Unequal, PlainValidator(Unequal, json_schema_input_type=str)],
        scale: float = 1.5,
        notes: dict[str, int] = {"a": 1},  # noqa: B006
    ) -> str:
        ran.append((where, numbers, one.number, made.name, scale, notes))
        return "ok"

    def hook(wanted: af.ToolCall) -> Any:
        shown.append(wanted.arguments["one"].number)
        return approve(wanted)

    text = '{ "made":"m",  "numbers": [3, 1,2, 33, 17], "one": {"name" :"n"},\n "where": {"tags": []} }'
    wanted = af.ToolCall("look", json.loads(text), text=text)
    async with scripted(wanted, "done") as flow, flow.state() as s:
        s += af.user("?")
        started = [
            event.call.text
            async for event in af.act(s, tools=[look], approve=hook)
            if isinstance(event, af.ToolStarted)
        ]
    assert started == [text]
    assert ran == [(Options(), {1, 2, 3, 17, 33}, *shown, "m", 1.5, {"a": 1})]


async def test_f37_a_hook_does_not_edit_the_default_of_a_parameter():
    ran = []

    def look(notes: dict[str, int] = {}) -> str:  # noqa: B006
        ran.append(dict(notes))
        return "ok"

    def approve(wanted: af.ToolCall) -> bool:
        wanted.arguments["notes"]["round"] = len(ran)
        return True

    await answered([look], call("look"), approve=approve)
    look()
    assert ran == [{"round": 0}, {}]


def find(what: str, function: str) -> str:
    return f"{what} {function}"


async def find_async(what: str, function: str) -> str:
    return f"{what} {function}"


def anything(**given: str) -> str:
    return " ".join(given.values())


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        (find, ["what", "function"]),
        (find_async, ["what", "function"]),
        (af.tool(find), ["what", "function"]),
        *[
            (af.tool(one, parameters={"type": "object"}), ["self", "what", "function", "args", "kwargs"])
            for one in (anything, af.tool(anything).__call__, af.tool(anything, parameters={}))
        ],
    ],
)
async def test_f37_parameters_of_tools_may_have_any_name(tool, names):
    named = af.tool(tool, name="one")
    assert await answered([named], call("one", **dict.fromkeys(names, "x"))) == [" ".join("x" for _ in names)]


# Ending early


async def state_is_valid(s: af.State, *contents: str) -> None:
    assert [m["content"] for m in await s.messages() if m["role"] == "tool"] == list(contents)
    s += af.user("Go on.") + af.reply("after")
    assert (await s["after"]).text == "fine"


async def test_a_cancelled_loop_leaves_no_task_and_a_valid_state():
    started, cancelled = anyio.Event(), []

    async def waiting() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)

    backend = af.Scripted({"answer": [(call("weather", city="a"), call("waiting"))], "after": "fine"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_when, started, scope)
                await af.act(s, tools=[weather, waiting])
        assert scope.cancelled_caught
        assert cancelled == [True]
        contents = [m["content"] for m in await s.messages() if m["role"] == "tool"]
        assert contents[0] in ("rain in a", f"{ERROR}the call was cancelled")
        await state_is_valid(s, contents[0], f"{ERROR}the call was cancelled")


async def cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@pytest.mark.parametrize("leaves_block", [False, True])
async def test_leaving_the_events_cancels_the_loop(leaves_block):
    cancelled = anyio.Event()

    async def waiting() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    backend = af.Scripted({"answer": [call("waiting")], "after": "fine"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        if leaves_block:
            async with af.act(s, tools=[waiting]) as events:
                async for event in events:
                    if isinstance(event, af.ToolStarted):
                        break
            await state_is_valid(s, f"{ERROR}the call was cancelled")
        else:
            async for event in af.act(s, tools=[waiting]):  # dropped, and collected
                if isinstance(event, af.ToolStarted):
                    await anyio.lowlevel.checkpoint()
                    break
            with anyio.fail_after(10):
                await cancelled.wait()


@pytest.mark.parametrize("cause", ["cancel", "sibling"])
async def test_a_state_that_fails_while_tools_run_cancels_them(cause):
    cancelled = []

    async def waiting() -> None:
        if cause == "cancel":
            branch.cancel()
        else:
            sibling.add(af.gen("broken"))
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)

    script = {"answer": [call("waiting")], "broken": af.errors.EngineFailed("broken")}
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        async with s.fork(2) as (branch, sibling):
            branch += af.user("?")
            with pytest.raises(af.AgentflowError):
                await af.act(branch, tools=[waiting])
        assert cancelled == [True]


async def test_an_error_of_the_hook_cancels_the_calls_and_is_raised():
    async def waiting() -> None:
        await anyio.sleep_forever()

    def approve(wanted: af.ToolCall) -> bool:
        if wanted.name == "weather":
            raise OSError("no terminal")
        return True

    backend = af.Scripted({"answer": [(call("waiting"), call("weather", city="a"))], "after": "fine"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(OSError, match="no terminal"):
            await af.act(s, tools=[waiting, weather], approve=approve)
        await state_is_valid(s, *[f"{ERROR}the call was cancelled"] * 2)


# Results


async def test_a_schema_makes_the_result_a_value():
    async with scripted(call("weather", city="a"), Place(city="Oslo")) as flow, flow.state() as s:
        s += af.user("?")
        assert await af.act(s, tools=[weather], schema=Place) == Place(city="Oslo")
        assert (await s["answer"]).text == '{"city": "Oslo", "days": 1}'
    async with scripted({"city": "Oslo", "days": 99}) as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(af.InvalidValue, check=lambda error: error.errors[0]["loc"] == ("days",)):
            await af.act(s, tools=[weather], schema=Place)


async def test_f37_an_invalid_result_has_its_text_and_faults():
    async with scripted({"city": "Oslo", "days": 99}) as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(af.InvalidValue) as failure:
            await af.act(s, tools=[weather], schema=Place)
        assert failure.value.text == '{"city": "Oslo", "days": 99}'
        assert [one["loc"] for one in failure.value.errors] == [("days",)]
        assert isinstance(failure.value.__cause__, ValidationError)
    async with scripted({"city": "Oslo " * 20}) as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(af.InvalidValue, match=r"truncated after 9 tokens .* raise max_tokens") as failure:
            await af.act(s, tools=[weather], schema=Place, max_tokens=9)
        assert failure.value.text.startswith('{"city": "Oslo')


REPLIES = {
    "call": (call("weather", city="a"),),
    "invalid": {"city": "Oslo", "days": 99},
    "truncated": {"city": "Oslo " * 20},
    "valid": {"city": "Oslo", "days": 2},
}


def expected_end(kinds: list[str], max_rounds: int, max_retries: int) -> tuple[str, list[str]]:
    """How a loop with ``on_invalid="reask"`` ends, and the roles of its turns."""
    roles = ["user"]
    for number, kind in enumerate(kinds, 1):
        roles.append("assistant")
        if kind == "valid":
            break
        if kind == "call":
            roles.append("tool")
            if number == max_rounds:
                return "limit", roles
        elif number == max_rounds or not max_retries:
            return "invalid", roles
        else:
            max_retries -= 1
            roles.append("user")
    return "valid", roles


@given(
    kinds=st.lists(st.sampled_from(["call", "invalid", "truncated"]), max_size=6),
    max_rounds=st.integers(1, 7),
    max_retries=st.integers(1, 3),
)
async def test_f37_reask_tells_the_model_about_an_invalid_result(kinds, max_rounds, max_retries):
    kinds = [*kinds, "valid"]
    end, roles = expected_end(kinds, max_rounds, max_retries)
    async with scripted(*[REPLIES[kind] for kind in kinds]) as flow, flow.state() as s:
        s += af.user("?")
        loop = af.act(
            s,
            tools=[weather],
            schema=Place,
            on_invalid="reask",
            max_rounds=max_rounds,
            max_retries=max_retries,
            max_tokens=9,
        )
        if end == "valid":
            assert await loop == Place(city="Oslo", days=2)
        else:
            with pytest.raises(af.InvalidValue if end == "invalid" else af.errors.LimitExceeded):
                await loop
        assert [message["role"] for message in await s.messages()] == roles


async def test_f37_reask_says_what_is_wrong():
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return json.dumps(REPLIES["invalid" if len(prompts) < 2 else "valid"])

    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        s += af.user("?")
        async with af.act(s, tools=[], schema=Place, on_invalid="reask") as events:
            seen = [event async for event in events]
    assert [one.number for one in seen if isinstance(one, af.RoundStarted)] == [1, 2]
    assert seen[-1] == af.ActDone(Place(city="Oslo", days=2))
    assert prompts[1].startswith(prompts[0])
    assert "days" in prompts[1].removeprefix(prompts[0]).partition("<user>")[2]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"on_invalid": "retry"}, "on_invalid"),
        ({"on_invalid": "reask", "schema": None}, "on_invalid"),
        ({"on_invalid": "reask", "max_retries": 0}, "max_retries"),
        ({"on_invalid": "reask", "max_retries": 21}, "max_retries"),
    ],
)
async def test_f37_wrong_options_of_reask_are_rejected(wrong, param):
    async with scripted() as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param(param)):
            af.act(s, **{"tools": [weather], "schema": Place} | wrong)


async def test_f37_an_unknown_option_is_reported_for_the_function_that_got_it():
    async with scripted() as flow, flow.state() as s:
        for name, ask in (("act", functools.partial(af.act, s)), ("reply", functools.partial(af.reply, "x"))):
            with pytest.raises(TypeError, match=rf"^{name}\(\) got .* 'max_turns'"):
                ask(tools=[weather], max_turns=3)
            with pytest.raises(af.errors.BadArgument, match=f"^{name}:", check=has_param("on_invalid")):
                ask(tools=[weather], schema=Place, on_invalid="retry")


async def test_options_of_gen_and_the_choice_are_passed_on():
    backend = af.Scripted({"said": [call("weather", city="a"), "done"]})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": "?"}])
        loop = af.act(s, tools=[weather], name="said", choice="required", temperature=0.5, max_tokens=9)
        assert await loop == "done"
        with pytest.raises(af.errors.BadArgument):
            await loop
        assert [m["role"] for m in await s.messages()] == ["user", "assistant", "tool", "assistant"]
    assert {(one.params.temperature, one.params.max_tokens) for one in backend.calls} == {(0.5, 9)}


# Recordings


async def test_a_replay_takes_the_results_from_the_recording(tmp_path):
    path, numbers = tmp_path / "run.jsonl", itertools.count()

    def number() -> int:
        return next(numbers)

    @af.program
    async def agent(s: af.State, question: str) -> tuple[str, list[dict[str, Any]]]:
        s += af.user(question)
        found = await af.act(s, tools=[number], approve=approve)
        return found, await s.messages()

    def approve(wanted: af.ToolCall) -> bool:
        return next(numbers) != 2

    calls = [call("number"), call("number")]
    async with af.session(backend=af.Scripted({"answer": [calls, calls, "x"]}), record=path) as flow:
        first = await flow.run(agent, "?")
    assert first[0] == "x"
    after = next(numbers)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(agent, "?") == first
    assert next(numbers) == after + 1, "a tool or the hook has run"
    async with af.session(backend=af.Replay(path), record=tmp_path / "again.jsonl") as flow:
        assert await flow.run(agent, "?") == first
    async with af.session(backend=af.Replay(tmp_path / "again.jsonl")) as flow:
        assert await flow.run(agent, "?") == first
        with pytest.raises(af.errors.ReplayDiffers):
            await flow.run(agent, "another question")


# Mistakes


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": None}, "tools"),
        ({"tools": [], "choice": "required"}, "choice"),
        ({"tools": [], "choice": "weather"}, "choice"),
        ({"tools": [{"name": "x", "parameters": {}}]}, "tools"),
        ({"tools": [weather, weather]}, None),
        ({"tools": [lambda: 1]}, None),
        ({"tools": [weather], "max_rounds": 0}, "max_rounds"),
        ({"tools": [weather], "max_calls": -1}, None),
        ({"tools": [weather], "call_timeout_s": 0}, None),
        ({"tools": [weather], "approve": "yes"}, "approve"),
        ({"tools": [weather], "choice": "sing"}, "choice"),
    ],
)
async def test_wrong_arguments_are_rejected_at_once(wrong, param):
    async with scripted("x") as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(af.errors.BadArgument) as caught:
            af.act(s, **wrong)
        assert param is None or caught.value.param == param
        assert await s.text() == "<user>?</user>"


async def test_f37_without_tools_the_first_reply_is_the_result():
    observed = Observed(af.Scripted({"answer": ["done", "more", (call("weather", city="Oslo"),), "end"]}))
    async with af.session(backend=observed) as flow, flow.state() as s:
        for answer in ("done", "more"):
            s += af.user("?")
            assert await af.act(s, tools=[]) == answer
        assert observed.of(ops.Tools) == []
        s += af.user("?")
        assert await af.act(s, tools=[]) == "end"  # the model calls a tool all the same
        failed = [m["content"] for m in await s.messages() if m["role"] == "tool"]
        assert [text.startswith(ERROR) for text in failed] == [True]


async def test_f37_a_loop_without_tools_may_follow_one_with_tools():
    observed = Observed(af.Scripted({"answer": ["one", "two"]}))
    async with af.session(backend=observed) as flow, flow.state() as s:
        for tools in ([weather], []):
            s += af.user("?")
            await af.act(s, tools=tools)
        assert [len(op.tools) for op in observed.of(ops.Tools)] == [1, 0]


async def test_f37_the_limit_of_rounds_has_its_name():
    async with scripted(*[(call("weather", city="Oslo"),)] * 2) as flow, flow.state() as s:
        s += af.user("?")
        with pytest.raises(af.errors.LimitExceeded, check=has_param("max_rounds")):
            await af.act(s, tools=[weather], max_rounds=2)


def test_a_turn_of_a_tool_is_another_function():
    with pytest.raises(af.errors.BadArgument, match="tool_result"):
        af.tool("12 degrees")  # type: ignore[call-overload]


async def test_a_loop_that_is_not_awaited_warns():
    async with scripted("x") as flow, flow.state() as s:
        s += af.user("?")
        with pytest.warns(RuntimeWarning, match="never awaited"):
            af.act(s, tools=[weather])


async def test_a_graph_cannot_hold_a_loop():
    @af.program
    async def agent(s: af.State, question: str) -> str:
        s += af.user(question)
        return await af.act(s, tools=[weather])

    with pytest.raises(af.errors.DataDependent):
        agent.trace()


@pytest.mark.parametrize("where", ["state", "session", "parent"])
@pytest.mark.parametrize("waiting", ["tool", "plain tool", "hook"])
async def test_f14a_a_deadline_ends_tools_and_approvals(where: str, waiting: str) -> None:
    """The state stays a valid conversation as far as it goes, and the tool is cancelled."""
    ended: list[str] = []  # the deadline leaves the tool time to begin

    async def waits(*_: Any) -> str:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("waits")
        return ""

    async def later() -> str:
        return await waits()

    def plain() -> str:
        if waiting == "plain tool":
            may_end.wait()
        return "pong"

    may_end = threading.Event()
    backend = af.Scripted({"answer": [call("later" if waiting == "tool" else "plain"), "done"]})
    async with af.session(backend=backend) as flow, flow.state() as root:
        s = root
        if where == "session":
            flow.limit(deadline_s=0.5)
        elif where == "parent":
            s = root.copy()
            root.limit(deadline_s=0.5)
        elif where == "state":
            s.limit(deadline_s=0.5)
        try:
            with anyio.fail_after(20), pytest.raises(af.DeadlineExceeded):
                await af.act(s, tools=[later, plain], approve=waits if waiting == "hook" else None)
        finally:
            may_end.set()
        assert ended == ([] if waiting == "plain tool" else ["waits"])


async def test_f14a_a_deadline_that_is_far_changes_nothing() -> None:
    async with scripted(call("weather", city="Oslo"), "done") as flow, flow.state() as s:
        s.limit(deadline_s=1000)
        assert await af.act(s, tools=[weather]) == "done"


async def test_f24b_half_a_surrogate_pair_in_a_result_is_escaped() -> None:
    def odd() -> str:
        return "caf\ud83d\u00e9"

    assert await answered([odd], call("odd")) == ["caf\\ud83d\u00e9"]


async def test_f24d_half_a_surrogate_pair_within_a_result_is_escaped() -> None:
    def odd() -> dict[str, list[str]]:
        return {"a": ["caf\ud83d"]}

    assert await answered([odd], call("odd")) == ['{"a": ["caf\\ud83d"]}']


async def test_f37_half_a_surrogate_pair_in_the_reason_of_a_denial_is_escaped() -> None:
    results = await answered([weather], call("weather", city="Oslo"), approve=lambda _: "caf\ud83d\u00e9")
    assert results == [f"{ERROR}the call was denied: caf\\ud83d\u00e9"]


@pytest.mark.parametrize("where", ["state", "parent", "session"])
@pytest.mark.parametrize("continues", [False, True])
async def test_f37_a_run_does_not_fail_with_a_deadline_that_its_program_caught(where, continues) -> None:
    async def waits() -> str:
        await anyio.sleep_forever()
        return ""

    @af.program
    async def program(root: af.State) -> str:
        s = root
        if where == "parent":
            s = root.copy()
        if where != "session":
            root.limit(deadline_s=0.1)
        try:
            await af.act(s, tools=[waits])
        except af.DeadlineExceeded:
            if continues:
                s += af.user("And now?") + af.assistant(af.gen("later"))
            return "partial"
        return "whole"

    with anyio.fail_after(30):
        for run in ("run", "map"):
            backend = af.Scripted({"answer": [call("waits")] * 2, "later": ["x"] * 2})
            async with af.session(backend=backend) as flow:
                if where == "session":
                    flow.limit(deadline_s=0.1)
                if run == "run":
                    assert await flow.run(program) == "partial"
                else:
                    assert await flow.map(program, [(), ()]) == ["partial"] * 2


async def test_f37_another_failure_than_the_caught_deadline_ends_the_run() -> None:
    async def waits() -> str:
        await anyio.sleep_forever()
        return ""

    @af.program
    async def program(root: af.State) -> str:
        root.limit(deadline_s=0.1)
        other = root.copy()
        with contextlib.suppress(af.DeadlineExceeded):
            await af.act(root, tools=[waits])
        other += "more"  # nothing of this program has raised its failure
        return "partial"

    with anyio.fail_after(30):
        async with af.session(backend=af.Scripted({"answer": [call("waits")]})) as flow:
            with pytest.raises(af.DeadlineExceeded):
                await flow.run(program)
