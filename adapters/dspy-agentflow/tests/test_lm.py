"""``AgentflowLM`` under DSPy's programs, on scripted answers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, Literal

import anyio
import dspy
import pytest
from dspy_agentflow import AgentflowLM
from dspy_agentflow.lm import EngineSettings
from scripts import answering, as_json, chat, scripted, settings_of

import agentflow as af
from agentflow.integrations import connection_through

SUGAR = chat(answer="sugar")


def test_a_prediction_its_prompt_and_its_usage() -> None:
    lm, model = scripted(answering(SUGAR), temperature=0.5, max_tokens=77)
    with dspy.context(lm=lm, track_usage=True):
        found = dspy.Predict("question -> answer")(question="What do plants make?")
    assert found.answer == "sugar"
    [prompt] = model.prompts
    assert prompt.startswith("<system>Your input fields are:")
    assert "<user>[[ ## question ## ]]\nWhat do plants make?" in prompt
    assert prompt.endswith("</user><assistant>")
    assert (model.params[0].temperature, model.params[0].max_tokens) == (0.5, 77)
    usage = found.get_lm_usage()["agentflow/default"]
    assert usage["completion_tokens"] == len(SUGAR.split())
    assert usage["prompt_tokens"] == len(prompt.split())
    assert dict(usage["prompt_tokens_details"])["cached_tokens"] == 0


def test_answers_keep_to_what_the_adapter_reads() -> None:
    lm, model = scripted([SUGAR, as_json(answer="sugar")])
    with dspy.context(lm=lm):
        dspy.Predict("question -> answer")(question="?")
        with dspy.context(adapter=dspy.JSONAdapter()):
            dspy.Predict("question -> answer")(question="?")
    chat_constraint, json_constraint = model.constraints
    assert chat_constraint is not None
    assert (chat_constraint.kind, chat_constraint.source[:8]) == ("regex", r"\[\[ ## ")
    assert json_constraint is not None
    assert json_constraint.kind == "schema"
    assert json.loads(json_constraint.source)["required"] == ["answer"]


def test_unless_they_should_not() -> None:
    lm, model = scripted(answering(SUGAR), follow_adapter=False)
    with dspy.context(lm=lm):
        assert dspy.Predict("question -> answer")(question="?").answer == "sugar"
    assert model.constraints == [None]


def test_the_free_call_is_free() -> None:
    lm, model = scripted(answering("Plants make sugar."))
    assert lm("What do plants make?") == ["Plants make sugar."]
    assert model.constraints == [None]
    assert model.programs == [""]


def test_an_answer_that_is_cut_off_is_brought_to_its_end() -> None:
    def script(prompt: str) -> str:
        if prompt.endswith("<assistant>"):
            return chat(reasoning="one two three four five", answer=5)
        return "\n\n[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"

    lm, model = scripted(script, max_tokens=6)
    with dspy.context(lm=lm):
        found = dspy.ChainOfThought("question -> answer: int")(question="?")
    assert (found.reasoning, found.answer) == ("one two", 4)
    assert model.prompts[1] == model.prompts[0] + "[[ ## reasoning ## ]]\none two"
    usage = lm.history[-1]["usage"]
    assert usage["completion_tokens"] == len(f"{model.prompts[1]}".removeprefix(model.prompts[0]).split()) + (
        len(script(".").split())
    )


def test_several_answers_are_a_fork_of_one_prompt() -> None:
    texts = [chat(answer=word) for word in ("sugar", "air", "honey")]
    lm, model = scripted(texts)
    with dspy.context(lm=lm, track_usage=True):
        found = dspy.Predict("question -> answer", n=3)(question="?")
    assert sorted(found.completions.answer) == ["air", "honey", "sugar"]
    assert model.forks == [3]
    assert model.params[0].temperature == 0.7  # DSPy's own choice for several answers
    assert found.get_lm_usage()["agentflow/default"]["completion_tokens"] == sum(
        len(text.split()) for text in texts
    )


def test_several_answers_with_a_seed_have_one_each() -> None:
    lm, model = scripted(answering(SUGAR), seed=7, temperature=1.0)
    lm("?", n=3)
    seeds = [params.seed for params in model.params]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_a_rollout_is_asked_anew_with_a_seed_of_its_own() -> None:
    lm, model = scripted(answering(SUGAR), seed=7, temperature=1.0, cache=True)
    for rollout_id in (None, 1, 2, 1, None):
        lm("Which rollout is this?", rollout_id=rollout_id)
    assert lm.copy(rollout_id=3)("Which rollout is this?") == [SUGAR]
    seeds = [params.seed for params in model.params]  # the others came from DSPy's cache
    assert len(seeds) == 4
    assert len(set(seeds)) == 4


async def in_parallel(program: Any, count: int) -> list[Any]:
    return await asyncio.gather(*[program.acall(question=str(n)) for n in range(count)])


def test_many_at_once_in_one_event_loop() -> None:
    lm, model = scripted(answering(SUGAR))
    with dspy.context(lm=lm):
        found = asyncio.run(in_parallel(dspy.Predict("question -> answer"), 20))
    assert len(found) == 20
    assert len(set(model.programs)) == 20


def test_cancelling_ends_the_work() -> None:
    lm, model = scripted(answering(chat(answer="sugar " * 5000)))

    async def main() -> None:
        with dspy.context(lm=lm):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(dspy.Predict("question -> answer").acall, question="?"))
                with anyio.fail_after(20):
                    await anyio.to_thread.run_sync(model.begun.wait)
                tasks.cancel_scope.cancel()
            with anyio.fail_after(20):
                await anyio.to_thread.run_sync(model.ended.wait)

    asyncio.run(main())
    assert model.num_running == 0


def test_streams_fields_as_they_come() -> None:
    lm, _ = scripted(answering(chat(reasoning="Leaves catch light.", answer="They make sugar of light.")))
    program = dspy.ChainOfThought("question -> answer")
    listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]

    async def main() -> list[Any]:
        stream = dspy.streamify(program, stream_listeners=listeners)(question="?")
        return [value async for value in stream]

    with dspy.context(lm=lm):
        *chunks, found = asyncio.run(main())
    said = [chunk for chunk in chunks if isinstance(chunk, dspy.streaming.StreamResponse)]
    assert "".join(chunk.chunk for chunk in said).strip() == "They make sugar of light."
    assert len(said) > 1
    assert found.answer == "They make sugar of light."


def test_streams_from_an_event_loop_what_was_cut_off_too() -> None:
    def script(prompt: str) -> str:
        if prompt.endswith("<assistant>"):
            return chat(reasoning="one two three four five", answer="six")
        return "\n\n[[ ## answer ## ]]\nfour\n\n[[ ## completed ## ]]"

    lm, _ = scripted(script, max_tokens=6)
    program = dspy.ChainOfThought("question -> answer")

    async def main() -> Any:
        stream = dspy.streamify(program, is_async_program=True)(question="?")
        return [value async for value in stream][-1]

    with dspy.context(lm=lm):
        found = asyncio.run(main())
    assert (found.reasoning, found.answer) == ("one two", "four")


class Kind(dspy.Signature):
    """Says of which kind it is."""

    question: str = dspy.InputField()
    reasoning: str = dspy.OutputField()
    kind: Literal["a garden", "a field"] = dspy.OutputField()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", ["chat", "json"])
def test_a_value_that_was_cut_off_is_streamed_once(kind: str, is_async: bool) -> None:
    fields = {"reasoning": "It is green.", "kind": "a garden"}
    whole = chat(**fields) if kind == "chat" else as_json(**fields)
    end = "green." if kind == "chat" else 'green."'
    head = whole[whole.index(end) + len(end) : whole.index("a garden")]

    def script(prompt: str) -> str:
        return (
            whole
            if prompt.endswith("<assistant>")
            else head + whole.partition(head)[2].replace("garden", "field")
        )

    lm, _ = scripted(script, max_tokens=len(whole.partition("garden")[0].split(" ")) - 1)
    adapter = dspy.ChatAdapter() if kind == "chat" else dspy.JSONAdapter()

    async def main() -> Any:
        stream = dspy.streamify(dspy.Predict(Kind), is_async_program=is_async)(question="?")
        return [value async for value in stream][-1]

    with dspy.context(lm=lm, adapter=adapter):
        found = asyncio.run(main())
    assert (found.reasoning, found.kind) == ("It is green.", "a field")


def test_an_adapter_that_adds_to_a_prompt_keeps_its_format() -> None:
    class Terse(dspy.ChatAdapter):
        """Says so."""

        def format(self, signature: Any, demos: Any, inputs: Any) -> Any:
            """With a turn before it."""
            return [{"role": "system", "content": "Be terse."}, *super().format(signature, demos, inputs)]

    lm, model = scripted(answering(SUGAR))
    with dspy.context(lm=lm, adapter=Terse()):
        dspy.Predict("question -> answer")(question="?")
    [constraint] = model.constraints
    assert constraint is not None
    assert constraint.kind == "regex"


def test_backends_of_ones_own_are_not_confused() -> None:
    for answer in ("A.", "B."):
        lm = AgentflowLM(backend=af.Scripted(lambda prompt, answer=answer: answer))
        assert lm("hi") == [answer]


def test_an_agent_with_tools() -> None:
    def script(prompt: str) -> str:
        if "[[ ## next_thought ## ]]" in prompt.rpartition("<user>")[2]:
            if "observation_0" in prompt.rpartition("<user>")[2]:
                return chat(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
            return chat(next_thought="Add.", next_tool_name="add", next_tool_args='{"x": 2, "y": 3}')
        return chat(reasoning="2 and 3 are 5.", answer=5)

    def add(x: int, y: int) -> int:
        """Adds."""
        return x + y

    lm, model = scripted(script)
    with dspy.context(lm=lm):
        found = dspy.ReAct("question -> answer: int", tools=[add], max_iters=3)(question="2 + 3?")
    assert found.answer == 5
    assert found.trajectory["observation_0"] == 5
    assert len(model.programs) == 3
    assert len(set(model.programs)) == 1  # one program, whose calls belong together


class Called(dspy.Signature):
    """Calls a tool."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return "cold"


@pytest.mark.skipif(dspy.__version__.startswith(("3.0.", "3.1.", "3.2.")), reason="DSPy asks LiteLLM")
def test_native_tool_calls() -> None:
    reply = af.Reply("", (af.ToolCall("weather", {"city": "Oslo"}, "c1"),))
    lm, model = scripted(lambda prompt: reply)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Called)(question="Cold in Oslo?", tools=[dspy.Tool(weather)])
    [call] = found.calls.tool_calls
    assert (call.name, call.args) == ("weather", {"city": "Oslo"})
    assert model.constraints == [None]  # the engine keeps the tools' schemas, under what it was told


class CalledAndSaid(Called):
    """Calls a tool, and says why."""

    said: str = dspy.OutputField()


@pytest.mark.skipif(dspy.__version__.startswith(("3.0.", "3.1.", "3.2.")), reason="DSPy asks LiteLLM")
def test_calls_and_the_other_fields() -> None:
    """An adapter reads both from one answer: a form would leave no place for calls."""
    call = af.ToolCall("weather", {"city": "Oslo"}, "c1")
    lm, model = scripted(lambda prompt: af.Reply('{"said": "I look."}', (call,)))
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(CalledAndSaid)(question="Cold in Oslo?", tools=[dspy.Tool(weather)])
    assert found.said == "I look."
    assert [one.name for one in found.calls.tool_calls] == ["weather"]
    assert model.constraints == [None]


def test_what_the_user_listens_to_is_heard_and_programs_are_known_all_the_same() -> None:
    class Listener(dspy.utils.callback.BaseCallback):
        def __init__(self) -> None:
            self.modules: list[str] = []

        def on_module_start(self, call_id: str, instance: Any, inputs: Any) -> None:
            self.modules.append(call_id)

    lm, model = scripted(answering(SUGAR))
    listener = Listener()
    dspy.configure(callbacks=[listener])
    with dspy.context(lm=lm):
        dspy.Predict("question -> answer")(question="1")
        dspy.Predict("question -> answer")(question="2")
    assert len(listener.modules) == 2
    assert model.programs[1] == listener.modules[1]


def test_only_chat() -> None:
    with pytest.raises(ValueError, match="model_type must be 'chat'"):
        AgentflowLM(model_type="text")


def test_the_salt_goes_along() -> None:
    lm, model = scripted(answering(SUGAR), cache_salt="tenant")
    lm("?")
    assert model.salt == "tenant"


def test_programs_end_with_their_module() -> None:
    lm, model = scripted(answering(SUGAR))
    with dspy.context(lm=lm):
        dspy.Predict("question -> answer")(question="?")
        lm.__class__(backend=af.Scripted([]))  # another one changes nothing
    settings_of(lm).connection("").shared.run(anyio_checkpoint)
    assert model.num_open == 0


async def anyio_checkpoint(flow: af.Session) -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


def test_an_evaluation_is_many_programs() -> None:
    lm, model = scripted(answering(SUGAR))
    examples = [dspy.Example(question=str(n), answer="sugar").with_inputs("question") for n in range(4)]
    evaluate = dspy.Evaluate(
        devset=examples,
        metric=lambda example, found, trace=None: example.answer == found.answer,
        num_threads=2,
        display_progress=False,
    )
    with dspy.context(lm=lm):
        found = evaluate(dspy.Predict("question -> answer"))
    assert float(getattr(found, "score", found)) == 100.0
    assert len(set(model.programs)) == 4
    assert "" not in model.programs


def test_f37_dspy_s_cache_does_not_mix_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: dict[str | None, Any] = {}

    def connection(settings: EngineSettings, model: str) -> Any:
        if settings.base_url not in servers:
            answers = [f"{settings.base_url} {number}" for number in range(9)]
            servers[settings.base_url] = connection_through(af.Scripted(answers))
        return servers[settings.base_url]

    monkeypatch.setattr(EngineSettings, "connection", connection)
    urls = (None, "ws://a:1", "ws://b:1")
    for name in (None, "same-name"):
        for call in (lambda lm: lm("f37"), lambda lm: asyncio.run(lm.acall("f37"))):
            found = [call(AgentflowLM(name, base_url=url, num_retries=0))[0] for url in (*urls, *urls)]
            assert [text.split()[0] for text in found[:3]] == [str(url) for url in urls]
            assert found[3:] == found[:3]  # from the cache
    lm = AgentflowLM(base_url="ws://a:1", num_retries=0)
    lm("f37")
    assert lm("f37", rollout_id=1, temperature=1.0) != lm("f37")
    assert set(lm.history[0]["kwargs"]) == set()


def test_f37_dspy_s_cache_does_not_mix_backends() -> None:
    lms = {name: scripted([f"from {name}"], cache=True)[0] for name in "AB"}
    for _ in range(2):
        for name, lm in lms.items():
            assert lm("f37 backends")[0] == f"from {name}"


def test_f37_dspy_s_cache_knows_whether_the_format_is_followed() -> None:
    lm, model = scripted(answering(SUGAR), cache=True)
    for other in (lm, lm.copy(follow_adapter=False), lm, lm.copy(follow_adapter=False)):
        with dspy.context(lm=other):
            assert dspy.Predict("question -> answer")(question="f37?").answer == "sugar"
    assert [constraint is None for constraint in model.constraints] == [False, True]
