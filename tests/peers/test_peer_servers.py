"""Each capability that the table claims for llama.cpp's server and for vLLM, on the servers themselves."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from peers.conftest import CONTEXT, Peer
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.errors import PromptTooLong, UnknownModel

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
anyio_backend = pytest.fixture(only_asyncio)

ODD_CHOICES = ['the "red" one', "green\nor blue", "é\t€", "a\\b", "[x]", "\x07\x7f", "\b\f"]


@af.tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return city


@pytest.fixture
async def flow(peer: Peer) -> AsyncIterator[af.Session]:
    """A session whose flavour, model and context the server tells."""
    async with af.session(peer.url) as opened:
        yield opened


def greedy(name: str, **options: Any) -> Any:
    return af.gen(name, **{"max_tokens": 8, "temperature": 0.0, **options})


async def answered(flow: af.Session, prompt: str = "Count to twenty.", **options: Any) -> str:
    """The answer to a turn."""
    async with flow.state() as s:
        s += af.user(prompt) + af.assistant(greedy("x", **options))
        return await s["x"]


async def test_a_server_says_what_it_is(peer: Peer, flow: af.Session) -> None:
    assert flow.capabilities.model == peer.model
    assert flow.capabilities.max_context == CONTEXT
    flavour: Any = peer.flavour
    backend = af.OpenAICompatible(peer.url, peer.model, flavour=flavour)
    async with af.session(backend=backend) as other:
        assert other.capabilities.constraints == flow.capabilities.constraints
        assert other.capabilities.sampling == flow.capabilities.sampling


async def test_turns_and_forks(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.system("Be brief.") + af.user("What do plants do?") + af.assistant(greedy("first"))
        async with s.fork(2) as branches:
            for number, branch in enumerate(branches):
                branch += af.user(f"Part {number}?") + af.assistant(greedy("part", max_tokens=4))
        s += af.user("Both: ", *[branch["part"] for branch in branches]) + af.assistant(greedy("last"))
        assert await s["last"]
        assert s["last"].usage.prompt_tokens > s["first"].usage.prompt_tokens


async def test_a_stream_and_its_usage(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Count to twenty.") + af.assistant(greedy("x", ignore_eos=True))
        assert "".join([delta async for delta in s["x"]]) == await s["x"]
        assert (s["x"].finish_reason, s["x"].usage.output_tokens) == ("length", 8)
        assert s["x"].usage.prompt_tokens > 0


async def test_a_turn_is_continued(flow: af.Session) -> None:
    """The prompt has the text of the turn, and the answer does not repeat it."""
    async with flow.state() as s:
        s += af.user("Count to twenty.") + af.assistant("1, 2, 3, ", greedy("x"), "\nSo: ", greedy("y"))
        assert not (await s["x"]).startswith("1, 2, 3")
        assert not (await s["y"]).startswith("So")
        begun = s["y"].usage.prompt_tokens
    async with flow.state() as s:
        s += af.user("Count to twenty.") + af.assistant(greedy("x"))
        await s
        assert s["x"].usage.prompt_tokens < begun


async def test_a_plain_text_is_continued(flow: af.Session) -> None:
    async with flow.state() as s:
        s += "Once upon a time" + greedy("x", top_logprobs=3)
        text = await s["x"]
        assert "".join(top[0].text for top in s["x"].top_logprobs) == text
        assert {len(top) for top in s["x"].top_logprobs} == {3}
        s += greedy("y", logprobs=True)
        await s
        assert len(s["y"].logprobs) == s["y"].usage.output_tokens


async def test_log_probabilities(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Say something.") + af.assistant(greedy("x", top_logprobs=3, ignore_eos=True))
        await s
        assert len(s["x"].top_logprobs) == len(s["x"].logprobs) == s["x"].usage.output_tokens
        for tops, logprob in zip(s["x"].top_logprobs, s["x"].logprobs, strict=True):
            assert len(tops) == 3
            assert tops[0].logprob == pytest.approx(logprob, abs=1e-3)
            assert logprob <= 0


# How each parameter shows. The likeliest token is the only one left by these: the text is the greedy one.
GREEDY_BY = {"top_k": 1, "min_p": 1.0, "top_p": 1e-6}


@pytest.mark.parametrize("name", GREEDY_BY)
async def test_a_parameter_that_leaves_one_token(flow: af.Session, name: str) -> None:
    only: dict[str, Any] = {name: GREEDY_BY[name]}
    assert await answered(flow, temperature=1.5, **only) == await answered(flow)


async def test_a_seed_repeats_a_text(flow: af.Session) -> None:
    texts = [await answered(flow, temperature=2.0, seed=seed) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_a_penalty_changes_a_text(flow: af.Session, name: str) -> None:
    penalty: dict[str, Any] = {name: 2.0}
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    assert await answered(flow, **penalty, **options) != await answered(flow, **options)


async def test_a_bias_decides(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hi") + af.assistant(greedy("x", logit_bias={100: 100.0}, logprobs=True, top_logprobs=1))
        text = await s["x"]
    async with flow.state() as s:
        s += af.user("Bye") + af.assistant(greedy("x", logit_bias={100: 100.0}, max_tokens=1))
        piece = await s["x"]
    assert text == 8 * piece


async def test_the_length_of_a_text(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hi") + af.assistant(greedy("x", max_tokens=3, ignore_eos=True))
        await s
        assert (s["x"].usage.output_tokens, s["x"].finish_reason) == (3, "length")
        if flow.capabilities.accepts("min_tokens"):
            s += af.user("Hi") + af.assistant(greedy("y", min_tokens=20, max_tokens=30))
            await s
            assert s["y"].usage.output_tokens >= 20


async def test_stops(flow: af.Session) -> None:
    whole = await answered(flow, max_tokens=20, ignore_eos=True)
    stop = whole[len(whole) // 2 :][:2]
    async with flow.state() as s:
        s += af.user("Count to twenty.") + af.assistant(
            greedy("x", max_tokens=20, stop=stop, ignore_eos=True)
        )
        assert await s["x"] == whole[: whole.index(stop)]
        assert s["x"].finish_reason == "stop"
        if flow.capabilities.accepts("stop_token_ids"):
            s += af.user("Go on.") + af.assistant(
                greedy("y", logit_bias={100: 100.0}, stop_token_ids=[100], max_tokens=20)
            )
            await s
            assert s["y"].usage.output_tokens == 1


async def test_constraints(flow: af.Session) -> None:
    constraints = flow.capabilities.constraints
    assert set(constraints) >= {"schema", "choices"}
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0}
    async with flow.state() as s, flow.state() as plain:
        s += af.user("Which?") + af.assistant(af.gen("flag", schema=bool, **options))
        s += af.user("Who?") + af.assistant(af.gen("who", schema={"enum": ["Ann", "Bo"]}, **options))
        plain += "A boolean: " + af.gen("flag", schema=bool, **options)
        assert {type(await s["flag"]), type(await plain["flag"])} == {bool}
        assert await s["who"] in ("Ann", "Bo")
        if "regex" in constraints:
            s += af.user("How many?") + af.assistant(af.gen("count", regex="[0-9]{2}x", **options))
            plain += " A number: " + af.gen("count", regex="[0-9]{2}x", **options)
            assert re.fullmatch("[0-9]{2}x", await s["count"])
            assert re.fullmatch("[0-9]{2}x", await plain["count"])
        if "grammar" in constraints:
            grammar = 'start: "yes" MORE~2\nMORE: /[ab]/'
            s += af.user("Yes?") + af.assistant(af.gen("yes", grammar=grammar, **options))
            assert re.fullmatch("yes[ab]{2}", await s["yes"])


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"regex": r"(?:[\^\]\-\\]{2}|é[^\n\x20-~])\s?"}, r"(?:[\^\]\-\\]{2}|é[^\n\x20-~])\s?"),
        ({"grammar": 'start: "[" [N ("," N)*] "]"\nN: /[0-9]{1,2}/'}, r"\[(?:\d{1,2}(?:,\d{1,2})*)?\]"),
    ],
)
async def test_patterns_and_grammars_are_kept(flow: af.Session, kind: dict[str, Any], pattern: str) -> None:
    if not set(kind) <= set(flow.capabilities.constraints):
        pytest.skip("the server does not enforce it")
    async with flow.state() as s:
        s += af.user("Write some.") + af.assistant(af.gen("x", **kind, max_tokens=200, temperature=0.0))
        text = await s["x"]
        assert re.fullmatch(pattern, text) or s["x"].finish_reason == "length"


@pytest.mark.parametrize("choice", ODD_CHOICES)
async def test_each_choice_can_be_written(flow: af.Session, choice: str) -> None:
    """With one other choice that begins with another character."""
    async with flow.state() as s, flow.state() as plain:
        s += af.user("Which?") + af.assistant("It is ", af.select("x", [choice]))
        plain += "Which? " + af.select("x", [choice, "zzz zz"])
        assert await s["x"] == choice
        assert await plain["x"] in (choice, "zzz zz")


async def test_tools(flow: af.Session) -> None:
    """The arguments of a complete call follow its schema. A model at temperature 0 may write white space
    without end before them."""
    async with flow.state() as s:
        s += af.user("What is the weather in Paris?")
        options: dict[str, Any] = {"max_tokens": 100, "temperature": 1.0, "seed": 1}
        s += af.assistant(af.reply("x", tools=[weather], choice="required", **options))
        reply = await s["x"]
        if flow.capabilities.model == "smollm2" and s["x"].finish_reason == "length":
            assert not reply.tool_calls  # llama.cpp's grammar allows any prose before the required call
            return
        assert {call.name for call in reply.tool_calls} == {"weather"}
        assert reply.tool_calls[0].arguments["city"] in ("Paris", "Rome")
        assert not any(call.fault for call in reply.tool_calls[:-1])


async def test_a_call_that_is_cut_has_a_fault(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("What is the weather in Paris?")
        s += af.assistant(af.reply("x", tools=[weather], choice="required", max_tokens=16, temperature=0.0))
        reply = await s["x"]
        assert s["x"].finish_reason == "length"
        for call in reply.tool_calls:
            assert call.fault or call.arguments["city"] in ("Paris", "Rome")


async def test_a_choice_beside_tools(flow: af.Session) -> None:
    """The tools of a state stay in its prompt, where they are in the server's cache."""
    async with flow.state() as s:
        s += af.user("Hello!") + af.assistant(af.reply("x", tools=[weather], choice="none", max_tokens=4))
        s += af.user("Which?") + af.assistant(af.select("y", ["red", "green"]))
        assert await s["y"] in ("red", "green")


async def test_a_prefix_is_found_in_the_cache(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.system("A prefix of some length. " * 8) + af.user("One.") + af.assistant(greedy("x"))
        s += af.user("Two.") + af.assistant(greedy("y"))
        await s
        assert s["y"].usage.cached_tokens > s["y"].usage.prompt_tokens // 3


async def test_a_cancelled_gen_leaves_the_server(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Go on.") + af.assistant(greedy("x", max_tokens=CONTEXT // 2, ignore_eos=True))
        async for _ in s["x"]:
            break
        s.cancel()
    assert await answered(flow)


async def test_a_prompt_that_is_too_long(flow: af.Session) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await answered(flow, "word " * 2 * CONTEXT)
    assert f"({CONTEXT} tokens)" in str(caught.value)


async def test_a_wrong_model(peer: Peer) -> None:
    async with af.session(backend=af.OpenAICompatible(peer.url, "another", max_retries=0)) as flow:
        if peer.flavour == "llamacpp":  # it answers as its one model to any name
            assert await answered(flow)
            return
        with pytest.raises(UnknownModel):
            await answered(flow)


async def test_embeddings(peer: Peer) -> None:
    if peer.embeds is None:
        pytest.skip("this server has no embeddings")
    async with af.session(peer.embeds, embed_model=peer.model) as flow:
        first, second, other = await flow.embed(["Bees make honey.", "Bees make honey.", "Ice is cold."])
        assert first == pytest.approx(second, abs=1e-3)
        assert first != pytest.approx(other, abs=1e-3)
        assert flow.runs[-1].usage.prompt_tokens > 0
        with pytest.raises(PromptTooLong):
            await flow.embed("word " * 1000)
