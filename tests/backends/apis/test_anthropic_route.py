"""The backend of Anthropic's API on agentflow's own route, with the deterministic engine. Programs have the
values that they have on the engine itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.faulty_servers import tenants
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.backends.apis.anthropic import Anthropic
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import NotAuthorized, UnknownModel

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)


LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcdefgh"]


def next_letter(seen: Any) -> int:
    """The model: its text depends on the prompt alone, at any temperature."""
    return LETTERS[zlib.crc32(seen.tobytes()) % len(LETTERS)]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size, num_slots=4096, max_context=1024, next_token=next_letter
    )
    with api_server(FakeEngine(runner=runner)) as found:
        yield found


def backend(server: ApiServer, model: str = MODEL) -> Anthropic:
    """A model that continues text and takes a temperature."""
    return Anthropic(model, base_url=server.url, api_key="any", like="claude-opus-4-5", max_retries=0)


@af.program
async def judge(s: af.State, essay: str) -> list[str]:
    """Its turns alternate, because the API joins others. Generated text is passed on as text, because the
    engine would keep the tokens of an answer, and an API sends its text again."""
    s += af.system("You are a strict judge.") + af.user(f"Essay: {essay}") + af.assistant("I have read it.")
    branches = s.fork(2)
    for name, branch in zip(("clarity", "style"), branches, strict=True):
        branch += af.user(f"Judge its {name}.")
        branch += af.assistant("It is" + af.gen("judgment", max_tokens=5))
    s += af.user("Both: " + branches[0]["judgment"] + branches[1]["judgment"])
    s += af.assistant(af.gen("last", max_tokens=4))
    return [*[await branch["judgment"] for branch in branches], await s["last"]]


async def test_a_program_has_the_values_that_it_has_on_the_engine(server: ApiServer) -> None:
    async with af.session(backend=backend(server)) as flow:
        found = await flow.run(judge, "Plants live on light.")
    async with af.session(server.url.replace("http", "ws")) as flow:
        assert await flow.run(judge, "Plants live on light.") == found
    assert all(found)


async def test_a_stream_and_its_usage(server: ApiServer) -> None:
    async with af.session(backend=backend(server)) as flow, flow.state() as s:
        s += af.user("What do plants do?") + af.assistant(af.gen("x", max_tokens=8))
        text = "".join([delta async for delta in s["x"]])
        assert text == await s["x"]
        assert s["x"].usage.output_tokens == 8
        assert s["x"].usage.prompt_tokens > 0
        assert s["x"].finish_reason == "length"


async def test_choices_and_schemas_are_enforced(server: ApiServer) -> None:
    async with af.session(backend=backend(server)) as flow, flow.state() as s:
        s += af.user("Yes or no?") + af.assistant(af.select("x", ["yes", "no"]))
        s += af.user("How many?") + af.assistant(af.gen("y", schema=bool, max_tokens=200))
        assert await s["x"] in ("yes", "no")
        assert isinstance(await s["y"], bool)


async def test_a_cancelled_gen_ends_in_the_engine(server: ApiServer) -> None:
    async with af.session(backend=backend(server)) as flow, flow.state() as s:
        s += af.user("Go on forever.") + af.assistant(af.gen("x", max_tokens=50_000))
        async for _ in s["x"]:
            s.cancel()
            break
        await anyio.to_thread.run_sync(server.assert_idle)


async def test_an_unknown_model_is_named(server: ApiServer) -> None:
    async with af.session(backend=backend(server, "nothing")) as flow, flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        with pytest.raises(UnknownModel) as caught:
            await s["x"]
    assert "nothing" in str(caught.value)


async def test_a_wrong_key_is_an_error() -> None:
    with api_server(tenants=tenants()) as locked:
        async with af.session(backend=backend(locked)) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            with pytest.raises(NotAuthorized):
                await s["x"]
