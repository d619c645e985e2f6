"""Pipelines of LangChain and DSPy, for ``adapters``. They run in the environment of an adapter.

``python adapter_pipelines.py PIPELINE ROUTE URL SIZE`` prints its time and counts as JSON. ``ROUTE``:
``adapter`` or ``openai``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import agentflow as af

MAX_TOKENS = 24
AT_ONCE = 16
TOPICS = ("the sea", "bread", "glaciers", "owls", "salt", "sundials", "silk", "bees")
FACTS = (
    "{0} was described by {1} early writers, who disagreed on its origin and on what it is good for.",
    "Of {0} there are {1} kinds, which differ in size, colour and in how long they last.",
    "In the north {0} is known under {1} names, and in the south under one.",
    "Whoever deals with {0} for {1} years knows that the weather matters more than skill.",
    "A museum shows {1} objects that have to do with {0}, most of them made of wood.",
)


def passage(number: int) -> str:
    """Returns a text of about a hundred tokens, different for each number."""
    topic = TOPICS[number % len(TOPICS)]
    return " ".join(fact.format(topic, number * 7 + place) for place, fact in enumerate(FACTS))


async def langchain_map_reduce(route: str, url: str, size: int) -> int:
    """Summarises ``size`` chunks, and then the summaries. Returns the number of malformed answers: 0."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    model = _langchain_model(route, url)
    start = [SystemMessage("You sum up texts for a lexicon: one sentence, no opinions, numbers as digits.")]
    for number in range(1000, 1004):  # solved cases
        start += [HumanMessage(passage(number)), AIMessage(f"It has to do with {number * 7} writers.")]
    prompts = [[*start, HumanMessage(passage(number))] for number in range(size)]
    summaries = await model.abatch(prompts)
    groups = [summaries[at : at + 8] for at in range(0, size, 8)]
    reduced = await model.abatch(
        [[*start, HumanMessage("\n".join(str(one.content) for one in group))] for group in groups]
    )
    await model.ainvoke([*start, HumanMessage("\n".join(str(one.content) for one in reduced))])
    return 0


def _langchain_model(route: str, url: str) -> Any:
    if route == "adapter":
        from langchain_agentflow import ChatAgentflow

        return ChatAgentflow(base_url=url, max_tokens=MAX_TOKENS, temperature=0)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=_http(url), api_key="none", model="smollm2-135m", max_tokens=MAX_TOKENS, temperature=0
    )


async def dspy_rag(route: str, url: str, size: int, **sampling: Any) -> int:
    """Answers ``size`` questions from passages, after four demonstrations. Returns the number of malformed
    answers."""
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    program = dspy.Predict(dspy.Signature("context: list[str], question -> answer"), **sampling)
    program.demos = [
        dspy.Example(
            context=[passage(number)],
            question=f"How many writers described {TOPICS[number % 8]}?",
            answer=f"{number * 7} writers did.",
        )
        for number in range(2000, 2004)
    ]
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> bool:
        context = [passage(number), passage(number + 1)]
        async with room:
            try:
                answer = await program.acall(
                    context=context, question=f"What is known of {TOPICS[number % 8]}?"
                )
            except AdapterParseError:
                return False
        return bool(dspy.majority(answer).answer)

    with dspy.context(lm=_dspy_lm(route, url), adapter=dspy.JSONAdapter()):
        return (await asyncio.gather(*[ask(number) for number in range(size)])).count(False)


async def dspy_votes(route: str, url: str, size: int) -> int:
    """Like ``questions``, with the majority of three sampled answers per question."""
    return await dspy_rag(route, url, size, n=3, temperature=0.7)


def _dspy_lm(route: str, url: str) -> Any:
    options: dict[str, Any] = {"max_tokens": 4 * MAX_TOKENS, "temperature": 0.0, "cache": False}
    if route == "adapter":
        from dspy_agentflow import AgentflowLM

        return AgentflowLM(base_url=url, **options)
    import dspy

    return dspy.LM("openai/smollm2-135m", api_base=_http(url), api_key="none", **options)


def _http(url: str) -> str:
    return url.replace("ws://", "http://") + "/v1"


# Each runs ``size`` inputs and returns the number of malformed answers.
PIPELINES: dict[str, Callable[[str, str, int], Awaitable[int]]] = {
    "langchain": langchain_map_reduce,
    "dspy": dspy_rag,
    "dspy_votes": dspy_votes,
}


async def measured(pipeline: str, route: str, url: str, size: int) -> dict[str, Any]:
    """Measures a pipeline. Modules are loaded and connections are open before the clock starts."""
    await PIPELINES[pipeline](route, url, 1)
    async with af.session(url) as flow:
        before = await flow.stats()
        began = time.perf_counter()
        num_failed = await PIPELINES[pipeline](route, url, size)
        seconds = time.perf_counter() - began
        after = await flow.stats()
    return {
        "seconds": seconds,
        "num_failed": num_failed,
        "output_tokens": after.generated_tokens - before.generated_tokens,
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "computed_tokens": (after.prompt_tokens - before.prompt_tokens)
        - (after.cached_tokens - before.cached_tokens),
    }


if __name__ == "__main__":
    _, pipeline_name, route_name, server_url, number_of_inputs = sys.argv
    answer = asyncio.run(measured(pipeline_name, route_name, server_url, int(number_of_inputs)))
    print(json.dumps(answer))
