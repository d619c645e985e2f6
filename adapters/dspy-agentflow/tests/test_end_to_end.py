"""DSPy's own programs on the default model: their outputs are parsed on the first try, whatever it says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import dspy
import pydantic
import pytest
from dspy_agentflow import AgentflowLM, wired

MODEL = "smollm2-135m"
ADAPTERS = [dspy.ChatAdapter(), dspy.JSONAdapter()]
IDS = ["chat", "json"]


class Plant(pydantic.BaseModel):
    """Of a garden."""

    name: str
    is_tree: bool


class Described(dspy.Signature):
    """Describe the garden."""

    text: str = dspy.InputField()
    kind: Literal["garden", "field"] = dspy.OutputField()
    num_plants: int = dspy.OutputField()
    area: float = dspy.OutputField()
    has_trees: bool = dspy.OutputField()
    plant: Plant = dspy.OutputField()
    colours: list[Literal["red", "green"]] = dspy.OutputField()


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema}}


@pytest.fixture(scope="module")
def lm() -> AgentflowLM:
    return AgentflowLM(MODEL, max_tokens=24, cache=False, num_retries=0)


@pytest.fixture(autouse=True)
def the_lm(own_settings: None, lm: AgentflowLM) -> None:
    """Of all tests here; none of its answers may fail to be parsed."""
    lm.history.clear()
    dspy.configure(lm=lm, track_usage=True)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_chain_of_thought(lm: AgentflowLM, adapter: Any) -> None:
    with dspy.context(adapter=adapter):
        found = dspy.ChainOfThought("question -> answer")(question="What do plants need?")
    assert isinstance(found.reasoning, str)
    assert isinstance(found.answer, str)
    assert len(lm.history) == 1  # the first try
    usage = found.get_lm_usage()[f"agentflow/{MODEL}"]
    assert usage["completion_tokens"] >= 10


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_typed_outputs(lm: AgentflowLM, adapter: Any) -> None:
    with dspy.context(adapter=adapter):
        found = dspy.Predict(Described)(text="An oak and two red roses.", config={"max_tokens": 120})
    types = {name: type(found[name]) for name in Described.output_fields}
    assert types == {
        "kind": str,
        "num_plants": int,
        "area": float,
        "has_trees": bool,
        "plant": Plant,
        "colours": list,
    }
    assert found.kind in ("garden", "field")
    assert len(lm.history) == 1


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_an_agent(lm: AgentflowLM, adapter: Any) -> None:
    asked = []

    def height_of(plant: str) -> int:
        """Height of a plant in metres."""
        asked.append(plant)
        return 3

    with dspy.context(adapter=adapter):
        agent = dspy.ReAct("question -> metres: int", tools=[height_of], max_iters=2)
        found = agent(question="How high is an oak?")
    assert isinstance(found.metres, int)
    assert found.trajectory["tool_name_0"] in ("height_of", "finish")
    assert isinstance(found.trajectory["tool_args_0"], dict)
    num_steps = sum(name.startswith("thought_") for name in found.trajectory)
    assert len(lm.history) == num_steps + 1  # each was parsed on the first try
    cached = [dict(call["usage"]["prompt_tokens_details"])["cached_tokens"] for call in lm.history]
    assert max(cached) > 100  # of the second call, most of the prompt


class Essay(dspy.Module):  # type: ignore[misc]
    """A chain of three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outline = dspy.ChainOfThought("topic -> outline, size: int")
        self.write = dspy.Predict("outline, size: int -> essay, is_long: bool")
        self.head = dspy.Predict("essay, is_long: bool -> title, words: list[str]")

    def forward(self, topic: str) -> Any:
        outline = self.outline(topic=topic)
        essay = self.write(outline=outline.outline, size=outline.size)
        return self.head(essay=essay.essay, is_long=essay.is_long)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
def test_a_wired_program(adapter: Any) -> None:
    with dspy.context(adapter=adapter):
        unwired = Essay()(topic="Rivers")
        found = wired(Essay())(topic="Rivers")
    assert found.toDict() == unwired.toDict()


def test_bootstrapped_demonstrations(lm: AgentflowLM) -> None:
    examples = [
        dspy.Example(question=question, answer="yes").with_inputs("question")
        for question in ("Is grass green?", "Is snow cold?")
    ]
    student = dspy.Predict("question -> answer: Literal['yes', 'no']")
    optimizer = dspy.BootstrapFewShot(
        metric=lambda example, found, trace=None: found.answer in ("yes", "no"),
        max_bootstrapped_demos=2,
        max_labeled_demos=2,
    )
    compiled = optimizer.compile(student, trainset=examples)
    assert len(compiled.demos) == 2
    assert compiled(question="Is fire hot?").answer in ("yes", "no")
    demos = [message for message in lm.history[-1]["messages"] if message["role"] == "assistant"]
    assert len(demos) == 2


def test_several_answers_share_a_prompt(lm: AgentflowLM) -> None:
    answers = lm("Name a plant of any garden that you know.", n=3, temperature=1.0)
    assert len(set(answers)) > 1
    usage = lm.history[-1]["usage"]
    num_cached = dict(usage["prompt_tokens_details"])["cached_tokens"]
    assert num_cached >= 2 * (usage["prompt_tokens"] / 3 - 1)


def test_rollouts_differ_and_are_found_again(lm: AgentflowLM) -> None:
    sampling = lm.copy(cache=True, temperature=1.0, seed=5, max_tokens=12)
    first, second, again = [sampling("Name some plants.", rollout_id=n)[0] for n in (1, 2, 1)]
    assert first != second
    assert again == first


def test_fields_stream(lm: AgentflowLM) -> None:
    program = dspy.ChainOfThought("question -> answer")
    listeners = [dspy.streaming.StreamListener(signature_field_name="reasoning")]
    stream = dspy.streamify(program, stream_listeners=listeners, is_async_program=True)

    async def main() -> list[Any]:
        return [value async for value in stream(question="What do plants need?")]

    *chunks, found = asyncio.run(main())
    said = "".join(chunk.chunk for chunk in chunks if isinstance(chunk, dspy.streaming.StreamResponse))
    assert len(chunks) > 1
    assert found.reasoning.startswith(said.strip()[:10])
    assert isinstance(found.answer, str)


def test_many_at_once(lm: AgentflowLM) -> None:
    program = dspy.Predict("question -> answer: bool")

    async def main() -> list[Any]:
        questions = ["Is grass green?", "Is snow warm?", "Is the sea dry?", "Is stone hard?"]
        return await asyncio.gather(*[program.acall(question=question) for question in questions])

    assert all(isinstance(found.answer, bool) for found in asyncio.run(main()))
    assert len(lm.history) == 4


def test_what_cannot_be_kept_is_refused(lm: AgentflowLM) -> None:
    with pytest.raises(Exception, match="schema"):
        lm("?", response_format=response_format({"type": "?"}))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ["--port", "0", "--kv-tokens", "4000", "--threads", "2"]
    command = [sys.executable, "-m", "agentflow", "serve", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        told = ""
        for line in server.stdout:
            told += line
            if "ws://" in line:
                yield "ws://" + line.partition("ws://")[2].split()[0]
                return
        raise AssertionError(f"the server ended before it was ready:\n{told}")
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_on_a_server(url: str) -> None:
    served = AgentflowLM(MODEL, base_url=url, max_tokens=24, cache=False)
    with dspy.context(lm=served):
        found = dspy.ChainOfThought("question -> answer: bool")(question="Is grass green?")
        awaited = asyncio.run(dspy.Predict("question -> answer: int").acall(question="1 + 1?"))
    assert isinstance(found.answer, bool)
    assert isinstance(awaited.answer, int)


def test_dspy_without_the_adapter(url: str) -> None:
    address = url.replace("ws://", "http://") + "/v1"
    plain = dspy.LM(f"openai/{MODEL}", api_base=address, api_key="none", max_tokens=120, cache=False)
    with dspy.context(lm=plain):
        for _ in range(2):
            assert len(plain("What do plants need?", max_tokens=8)) == 1
        assert dict(plain.history[-1]["usage"]["prompt_tokens_details"])["cached_tokens"] > 0
        [text] = plain(
            "Name a plant.", temperature=0, response_format=response_format(Plant.model_json_schema())
        )
    Plant.model_validate_json(text)
