"""Wired programs: the outputs of the program, in one trip to the backend."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import dspy
import msgspec
import pytest
from dspy_agentflow import AgentflowLM, wired
from scripts import Recorded, as_json, chat

import agentflow as af
from agentflow.protocol import ops

ADAPTERS = [dspy.ChatAdapter(), dspy.JSONAdapter()]
IDS = ["chat", "json"]


class Held:
    """A scripted backend that delivers nothing before the client has sent ``num_awaited`` gens."""

    def __init__(self, script: Any) -> None:
        self._inner = af.Scripted(script)
        self._inner.generator = self.generator = Recorded(script)
        self.sent: list[ops.Op] = []
        self.num_awaited = 0
        self._held: list[Any] = []

    @property
    def num_gens(self) -> int:
        return sum(isinstance(op, ops.Gen) for op in self.sent)

    @property
    def num_refs(self) -> int:
        """The references in texts."""
        parts = [part for op in self.sent if isinstance(op, ops.Text) for part in op.parts]
        return sum(isinstance(part, ops.Ref) for part in parts)

    @property
    def programs(self) -> list[str]:
        return [op.program for op in self.sent if isinstance(op, ops.Open)]

    @asynccontextmanager
    async def connect(self, deliver: Any, lost: Any):
        def released() -> None:
            if self.num_gens >= self.num_awaited:
                held, self._held = self._held, []
                for events in held:
                    deliver(events)

        def received(events: Any) -> None:
            self._held.append(events)
            released()

        async with self._inner.connect(received, lost) as connection:
            send = connection.send

            def sent(batch: Any) -> None:
                self.sent += batch
                send(batch)
                released()

            connection.send = sent  # type: ignore[method-assign]
            yield connection


NAMES = (
    *("reasoning", "outline", "essay", "size", "title", "pro", "con", "verdict", "is_long", "kind", "points"),
    *("share", "plant", "draft", "answer"),
)
TYPED: dict[str, Any] = {
    "size": 12,
    "is_long": True,
    "points": ["one", "two"],
    "share": 0.5,
    "plant": {"name": "oak"},
}
VALUES = {
    "size": "12",
    "is_long": "True",
    "kind": "essay",
    "points": '["one", "two"]',
    "share": "0.50",
    "plant": '{"name": "oak"}',
}


def asked_in(prompt: Any) -> list[str]:
    """The output fields that a prompt of either adapter asks for."""
    request = str(prompt).rpartition("Respond with")[2]
    asked = [name for name in NAMES if f"`[[ ## {name} ## ]]`" in request or f"`{name}`" in request]
    return sorted(asked, key=request.index)


def script_of(adapter: Any) -> Any:
    """Answers in the adapter's format that depend on all of the prompt."""

    def answer(prompt: Any) -> str:
        text, asked = str(prompt), asked_in(prompt)
        digest = f"{len(text)} {sum(map(ord, text)) % 997}"
        values = {name: VALUES.get(name, f"({name}\n\n {digest})") for name in asked}
        if isinstance(adapter, dspy.JSONAdapter):
            return as_json(**{name: TYPED.get(name, value) for name, value in values.items()})
        return chat(**values)

    return answer


def scripted(adapter: Any, **kwargs: Any) -> tuple[AgentflowLM, Held]:
    backend = Held(kwargs.pop("script", script_of(adapter)))
    return AgentflowLM(backend=backend, **{"cache": False, "num_retries": 0, **kwargs}), backend


def requested(generator: Recorded) -> list[str]:
    """The sampling parameters and constraints of all calls; seeds differ in each run."""
    params = [msgspec.structs.replace(one, seed=None) for one in generator.params]
    return sorted([str(pair) for pair in zip(params, generator.constraints, strict=True)])


def both(
    program: dspy.Module, adapter: Any, num_awaited: int = 0, *, is_async: bool = False, **inputs: Any
) -> Held:
    """Runs the program unwired and wired, and compares everything that DSPy shows of them. ``num_awaited``:
    the calls that the wired program must have sent before it gets an answer. Returns its backend."""
    found = []
    for is_wired in (False, True):
        lm, backend = scripted(adapter)
        backend.num_awaited = num_awaited if is_wired else 0
        run = wired(program) if is_wired else program
        with dspy.context(lm=lm, adapter=adapter, trace=[], track_usage=True):
            prediction = asyncio.run(run.acall(**inputs)) if is_async else run(**inputs)
            found.append(
                (
                    prediction.toDict(),
                    {name: type(value) for name, value in prediction.items()},
                    sorted(backend.generator.prompts),
                    requested(backend.generator),
                    [(part, given, made.toDict()) for part, given, made in dspy.settings.trace],
                    sorted([str(entry["messages"]) for entry in lm.history]),
                    sorted([str(entry["outputs"]) for entry in lm.history]),
                    prediction.get_lm_usage(),
                )
            )
    assert found[0] == found[1]
    return backend


class Essay(dspy.Module):  # type: ignore[misc]
    """A straight line of three predictors."""

    def __init__(self) -> None:
        super().__init__()
        self.outline = dspy.ChainOfThought("topic -> outline")
        self.write = dspy.Predict("outline, topic -> essay, size: int")
        self.head = dspy.Predict("essay, size: int, outline -> title")

    def forward(self, topic: str) -> dspy.Prediction:
        outline = self.outline(topic=topic)
        written = self.write(outline=outline.outline, topic=topic)
        return self.head(essay=written.essay, size=written.size, outline=outline["outline"])

    async def aforward(self, topic: str) -> dspy.Prediction:
        outline = await self.outline.acall(topic=topic)
        written = await self.write.acall(outline=outline.outline, topic=topic)
        return await self.head.acall(essay=written.essay, size=written.size, outline=outline["outline"])


class Sides(dspy.Module):  # type: ignore[misc]
    """Two calls that wait for nothing, and one for both, in a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = {
            "pro": dspy.Predict("topic -> pro"),
            "con": dspy.ChainOfThought(dspy.Signature("topic -> con", "Argue against it.\n\nBe brief.")),
        }
        self.judge = dspy.ChainOfThought("pro, con -> kind: Literal['essay', 'poem'], verdict")
        self.judge.predict.demos = [
            dspy.Example(pro="It is.", con="It is not.", reasoning="Hm.", kind="poem", verdict="Both."),
            dspy.Example(pro="Yes.", verdict="Fine."),
        ]

    def forward(self, topic: str) -> dspy.Prediction:
        judged = self.judged(topic)
        return dspy.Prediction(verdict=judged.verdict, kind=judged.kind)

    def judged(self, topic: str) -> dspy.Prediction:
        pro = self.sides["pro"](topic=topic)
        con: dspy.Prediction = self.sides["con"](topic=topic)
        text = con.con
        return self.judge(pro=pro.pro, con=text)


class Nested(dspy.Module):  # type: ignore[misc]
    """Modules in a module, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.essay = Essay()
        self.shorten = Shorten()

    def forward(self, topic: str) -> dspy.Prediction:
        made = self.essay(topic=topic)
        short = self.shorten(text=made.title, times=2)
        return dspy.Prediction(title=made.title, short=short.draft)


class Shorten(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict("text -> draft")

    def forward(self, text: str, times: int) -> dspy.Prediction:
        made = self.step(text=text)
        for _ in range(times):
            made = self.step(text=made.draft)
        return made


class Forward(dspy.Module):  # type: ignore[misc]
    """A program with a given function."""

    def __init__(self, function: Any, **predictors: Any) -> None:
        super().__init__()
        self.function = function
        self.first = dspy.Predict("topic -> draft, is_long: bool, points: list[str], share: float")
        self.second = dspy.Predict("draft -> answer")
        self.more = predictors

    def forward(self, **inputs: Any) -> Any:
        return self.function(self, **inputs)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_straight_line_is_sent_in_one_trip(adapter: Any, is_async: bool) -> None:
    backend = both(Essay(), adapter, 3, is_async=is_async, topic="rivers")
    assert wired(Essay()).unwired == ()
    assert backend.num_gens == 3
    assert backend.num_refs == 4
    assert len(set(backend.programs)) == 1
    assert backend.programs[0]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
@pytest.mark.parametrize("kind", [dspy.Predict, dspy.ChainOfThought])
def test_one_predictor(adapter: Any, kind: Any) -> None:
    backend = both(kind("topic -> points: list[str], answer"), adapter, 1, topic="rivers")
    assert backend.num_refs == 0


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_modules_in_modules_and_loops(adapter: Any) -> None:
    backend = both(Nested(), adapter, 6, topic="rivers")
    assert backend.num_refs == 7


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_independent_calls_of_a_helper_are_sent_together(adapter: Any) -> None:
    backend = both(Sides(), adapter, 3, topic="rivers")
    assert backend.num_refs == 2


def in_context(self: Any, topic: str) -> Any:
    with dspy.context(lm=dspy.settings.lm.copy(max_tokens=77)):
        made = self.first(topic=topic)
    return self.second(draft=made.draft)


def wired_inside(self: Any, topic: str) -> Any:
    self.more["essay"] = wired(self.more["essay"])
    made = self.more["essay"](topic=topic)
    return self.second(draft=made.title)


@pytest.mark.parametrize(("function", "num_sent", "num_refs"), [(in_context, 2, 1), (wired_inside, 3, 4)])
def test_settings_and_wired_programs_in_programs(function: Any, num_sent: int, num_refs: int) -> None:
    backend = both(Forward(function, essay=Essay()), ADAPTERS[0], num_sent, topic="rivers")
    assert backend.num_refs == num_refs


def in_parts(self: Any, topic: str) -> Any:
    made = [self.first(topic=f"{topic} {number}") for number in range(3)]
    texts = [one.draft for one in made]
    each = [self.second(draft=one.draft) for one in made]
    answers: list[Any] = []
    for text in texts:
        last = self.second(draft=text)
    whole = self.more["merge"](texts=[one.answer for one in each], first=texts[0], last=last.answer)
    return dspy.Prediction(made=made, texts=texts, whole=whole.verdict, first=each[0]["answer"], all=answers)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_calls_of_comprehensions_are_sent_together(adapter: Any) -> None:
    merge = dspy.Predict("texts: list[str], first, last -> verdict")
    backend = both(Forward(in_parts, merge=merge), adapter, 9, topic="rivers")
    assert backend.num_gens == 10
    assert backend.num_refs >= 6  # the last call needs a list, so it waits


def uses_text(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    return self.second(draft=made.draft.upper())


def branches(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    if made.is_long:
        return self.second(draft=made.draft)
    return made


def tries(self: Any, topic: str) -> Any:
    try:
        made = self.first(topic=topic)
    except ValueError:
        return None
    return self.second(draft=made.draft)


def keeps(self: Any, topic: str) -> Any:
    self.more["kept"] = self.first(topic=topic)
    return self.second(draft=self.more["kept"].draft)


def gives_parsed(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    return self.second(draft=made.points)


def gives_all(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    return self.second(draft=made)


def in_comprehension(self: Any, topic: str) -> Any:
    made = [self.first(topic=one) for one in (topic, "lakes")]
    return self.second(draft="".join([one.draft for one in made]))


def in_lambda(self: Any, topic: str) -> Any:
    made = (lambda: self.first(topic=topic))()
    return self.second(draft=made.draft)


def to_function(self: Any, topic: str) -> Any:
    return self.second(draft=longest(self.first(topic=topic)))


def longest(made: Any) -> str:
    return max(made.draft.split("\n"), key=len)


@pytest.mark.parametrize(
    "function",
    [uses_text, branches, tries, keeps, gives_parsed, gives_all, in_comprehension, in_lambda, to_function],
)
def test_values_that_code_needs_are_waited_for(function: Any) -> None:
    backend = both(Forward(function), ADAPTERS[0], 1, topic="rivers")
    assert backend.num_refs == 0


def passes_typed(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    answer = self.second(draft=made.draft)
    return dspy.Prediction(made=made, answers=[answer.answer], both=(made.share, answer["answer"]))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_typed_outputs_are_returned_as_parsed(adapter: Any) -> None:
    results = []
    for is_wired in (False, True):
        lm, _ = scripted(adapter)
        program = Forward(passes_typed)
        with dspy.context(lm=lm, adapter=adapter):
            found = wired(program)(topic="rivers") if is_wired else program(topic="rivers")
        results.append((found.made.toDict(), found.answers, found.both))
    assert results[0] == results[1]


def ends_in_if(self: Any, topic: str) -> Any:
    made = self.first(topic=topic)
    answer = self.second(draft=made.draft)
    return answer if answer.answer else None


def test_a_call_that_is_waited_for_gets_references() -> None:
    backend = both(Forward(ends_in_if), ADAPTERS[0], 2, topic="rivers")
    assert backend.num_refs == 1


class Unwired(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("topic -> draft")
        self.second = dspy.Predict("draft -> answer")
        self.agent = dspy.ReAct("answer -> verdict", tools=[])

    def forward(self, topic: str) -> Any:
        made = self.first(topic=topic)
        print(made.draft)
        answer = self.second(draft=made.draft)
        return self.agent(answer=answer.answer)


def test_unwired_calls_are_listed() -> None:
    found = {part.part: part.reason for part in wired(Unwired()).unwired}
    assert {"first", "second"} <= found.keys()
    assert "made.draft" in found["first"]
    assert "answer.answer" in found["second"]
    with dspy.context(adapter=dspy.XMLAdapter()):
        [part] = wired(Essay()).unwired
    assert "XMLAdapter" in part.reason
    with dspy.context(lm=dspy.utils.DummyLM([])):
        assert [part.part for part in wired(Sides()).unwired] == [
            "sides['pro']",
            "sides['con'].predict",
            "judge.predict",
        ]


class WiredInside(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = wired(Sides())
        self.last = dspy.Predict("draft -> answer")

    def forward(self, topic: str) -> Any:
        return self.last(draft=self.inner(topic=topic).verdict)


def test_a_wired_program_in_a_wired_one_is_listed() -> None:
    assert [part.part for part in wired(WiredInside()).unwired] == ["inner"]
    both(WiredInside(), ADAPTERS[0], topic="rivers")


def test_a_wired_program_is_wired_once() -> None:
    program = Essay()
    assert wired(wired(program)).module is program


@pytest.mark.parametrize("given", [Essay, lambda topic: topic, "topic -> essay"])
def test_only_modules_are_wired(given: Any) -> None:
    with pytest.raises(af.errors.BadArgument, match=r"dspy\.Module"):
        wired(given)


def test_other_adapters_and_models_run_as_before() -> None:
    def xml(prompt: Any) -> str:
        names = ("draft", "is_long", "points", "share", "answer")
        request = str(prompt).rpartition("Respond with")[2]
        return "".join(
            [f"<{name}>{VALUES.get(name, len(str(prompt)))}</{name}>" for name in names if name in request]
        )

    results = []
    for is_wired in (False, True):
        lm, _ = scripted(None, script=xml)
        with dspy.context(lm=lm, adapter=dspy.XMLAdapter()):
            program = dspy.Predict("topic -> answer")
            results.append((wired(program) if is_wired else program)(topic="rivers").toDict())
    assert results[0] == results[1]
    answers = [{"reasoning": "Hm.", "outline": "a"}, {"essay": "b", "size": "3"}, {"title": "c"}]
    with dspy.context(lm=dspy.utils.DummyLM(answers)):
        assert wired(Essay())(topic="rivers").title == "c"


ODD = {
    "a header in the text": "one\n[[ ## other ## ]]\ntwo",
    "carriage returns": "one\r\ntwo\x0bthree",
    "spaces": "  \t one \u2028 two  ",
    "an empty text": "",
    "a placeholder's form": "{outline} \ue000ab\ue001 \\1 \n",
    "the end": "one\n\n[[ ## completed ## ]]\ntwo",
}


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_texts_arrive_as_dspy_parses_them(text: str, adapter: Any) -> None:
    plain = script_of(adapter)

    def script(prompt: Any) -> str:
        if asked_in(prompt) == ["reasoning", "outline"]:
            written = {"reasoning": "Hm.", "outline": text}
            return as_json(**written) if isinstance(adapter, dspy.JSONAdapter) else chat(**written)
        return plain(prompt)

    results = []
    for is_wired in (False, True):
        lm, backend = scripted(adapter, script=script, follow_adapter=False)
        with dspy.context(lm=lm, adapter=adapter):
            found = (wired(Essay()) if is_wired else Essay())(topic="rivers")
        results.append((found.toDict(), backend.generator.prompts[-1]))
    assert results[0] == results[1]


def test_an_answer_that_only_the_other_adapter_parses() -> None:
    plain, as_object = script_of(ADAPTERS[0]), script_of(ADAPTERS[1])

    def script(prompt: Any) -> str:
        is_json = "JSON object" in str(prompt).rpartition("Respond with")[2]
        if not is_json and "outline" in asked_in(prompt):
            return "I will not."
        return as_object(prompt) if is_json else plain(prompt)

    results = []
    for is_wired in (False, True):
        lm, _ = scripted(None, script=script, follow_adapter=False)
        with dspy.context(lm=lm):
            found = (wired(Essay()) if is_wired else Essay())(topic="rivers")
        results.append(found.toDict())
    assert results[0] == results[1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_first_failure_is_raised(is_async: bool) -> None:
    def script(prompt: Any) -> str:
        return "I will not."

    errors = []
    for is_wired in (False, True):
        lm, _ = scripted(None, script=script, follow_adapter=False)
        program = wired(Essay()) if is_wired else Essay()
        with dspy.context(lm=lm), pytest.raises(dspy.LMError) as caught:
            asyncio.run(program.acall(topic="rivers")) if is_async else program(topic="rivers")
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_failure_of_the_program_cancels_its_calls() -> None:
    def fails(self: Any, topic: str) -> Any:
        made = self.first(topic=topic)
        self.second(draft=made.draft)
        raise KeyError(topic)

    lm, backend = scripted(ADAPTERS[0])
    backend.num_awaited = 9  # nothing is delivered
    with dspy.context(lm=lm), pytest.raises(KeyError, match="rivers"):
        wired(Forward(fails))(topic="rivers")


def test_cached_answers_are_used() -> None:
    lm, backend = scripted(ADAPTERS[0], cache=True)
    with dspy.context(lm=lm):
        program = wired(Essay())
        found = [program(topic="cached rivers").toDict() for _ in range(3)]
        assert backend.num_gens == 6  # a prompt with references is not cached
        found.append(asyncio.run(Essay().acall(topic="cached rivers")).toDict())
        assert all(one == found[0] for one in found)
        assert backend.num_gens == 6


def test_optimizers_and_evaluation_take_wired_programs() -> None:
    examples = [dspy.Example(topic=topic, title="").with_inputs("topic") for topic in ("rivers", "lakes")]
    lm, _ = scripted(ADAPTERS[0])
    with dspy.context(lm=lm):
        optimizer = dspy.BootstrapFewShot(
            metric=lambda example, found, trace=None: True, max_bootstrapped_demos=1
        )
        compiled = optimizer.compile(wired(Essay()), trainset=examples)
        assert [len(predictor.demos) for predictor in compiled.predictors()] == [2, 2, 2]
        demos = [
            demo for predictor in compiled.predictors() for demo in predictor.demos if "augmented" in demo
        ]
        assert {type(value) for demo in demos for value in demo.toDict().values()} <= {str, int, bool}
        assert compiled(topic="seas").title == compiled.module(topic="seas").title
