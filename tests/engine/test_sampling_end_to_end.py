"""Each parameter of ``gen`` arrives: from the program through the interpreter, with or without a websocket
in between, to the sampler. The reference model computes the expected output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.faults import has_param
from support.logit_runner import alone_by_logits, logit_engine, logit_runner, logits_after
from support.plain_engine import End
from support.plain_model import PLAIN_IDS

import agentflow as af
from agentflow.backends.remote import Remote
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol.backend import Backend
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]

PROMPT = "plain as a pikestaff"
PROMPT_IDS = TOKENIZER.encode(PROMPT)
MOST = 24


def expected(**options) -> End:
    """The reference model's output under the options of a gen."""
    options = {"max_tokens": MOST} | options
    biases = tuple(sorted(options.pop("logit_bias", {}).items()))
    return alone_by_logits(PROMPT_IDS, SamplingParams(**options, logit_bias=biases), options.get("seed", 0))


OPEN = expected(ignore_eos=True)
ENDING = {"temperature": 1.0, "seed": 11}
SAMPLED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
# For each parameter: options under which it changes the text, and its value.
CASES: dict[str, tuple[dict, dict]] = {
    "max_tokens": ({"ignore_eos": True}, {"max_tokens": 7}),
    "min_tokens": (ENDING, {"min_tokens": len(expected(**ENDING).ids) + 5}),
    "temperature": ({"ignore_eos": True, "seed": 11}, {"temperature": 1.0}),
    "top_p": (SAMPLED, {"top_p": 0.3}),
    "top_k": (SAMPLED, {"top_k": 2}),
    "min_p": (SAMPLED, {"min_p": 0.6}),
    "frequency_penalty": ({"ignore_eos": True}, {"frequency_penalty": 0.7}),
    "presence_penalty": ({"ignore_eos": True}, {"presence_penalty": 1.9}),
    "repetition_penalty": ({"ignore_eos": True}, {"repetition_penalty": 1.4}),
    "logit_bias": ({"ignore_eos": True}, {"logit_bias": {OPEN.ids[3]: -100, PLAIN_IDS[5]: 2.5}}),
    "seed": ({"ignore_eos": True, "temperature": 1.0, "seed": 1}, {"seed": 2**40}),
    "stop": ({"ignore_eos": True}, {"stop": (OPEN.text[6:8],)}),
    "stop_regex": ({"ignore_eos": True}, {"stop_regex": "[^a-zA-Z]{2}|" + OPEN.text[9]}),
    "stop_token_ids": ({"ignore_eos": True}, {"stop_token_ids": (OPEN.ids[5],)}),
    "ignore_eos": (ENDING, {"ignore_eos": True}),
}
ALL_AT_ONCE = {
    "min_tokens": 12,
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {PLAIN_IDS[3]: 1.5},
    "seed": 77,
    "stop": ("zz",),
    "stop_regex": r"\d\d",
    "stop_token_ids": (PLAIN_IDS[8],),
}


class LogitEngine(FakeEngine):
    """The engine in this process on the model with logits."""

    def __init__(self) -> None:
        super().__init__(runner=logit_runner())


@contextmanager
def serving() -> Iterator[str]:
    """A server of that engine, on a free port; its url."""

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[EngineGenerator]:
        async with logit_engine() as client:
            yield EngineGenerator(client, TEMPLATE)

    with start_blocking_portal("asyncio") as portal:
        running = portal.call(lambda: running_server(one_model(open_generator)))
        with portal.wrap_async_context_manager(running) as server:
            yield server.url


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    opened: AbstractContextManager[str] = serving()
    with opened as found:
        yield found


@pytest.fixture(params=["in process", pytest.param("json", marks=pytest.mark.full), "msgpack"])
def backend(request: pytest.FixtureRequest, url: str) -> Backend:
    if request.param == "in process":
        return LogitEngine()
    return Remote(url, encoding=request.param)


async def generated(backend: Backend, **options) -> af.Variable:
    """The variable of a gen with these options."""
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += PROMPT + af.gen("x", **({"max_tokens": MOST} | options))
        await s["x"]
        return s["x"]


@pytest.mark.parametrize("name", CASES)
async def test_each_parameter_arrives(backend: Backend, name: str) -> None:
    without, with_it = CASES[name]
    want = expected(**without | with_it)
    other = expected(**without)
    assert (want.text, want.reason) != (other.text, other.reason), "the case shows nothing"
    variable = await generated(backend, **without | with_it)
    assert (variable.text, variable.finish_reason) == (want.text, want.reason)
    assert (variable.logprobs, variable.top_logprobs) == (None, None)


def test_every_parameter_has_a_case() -> None:
    reported = {"logprobs", "top_logprobs"}
    of_reasoning = {"max_reasoning_tokens", "stream_reasoning"}  # a generator's (test_reasoning_programs.py)
    assert CASES.keys() | reported | of_reasoning == set(SamplingParams.__struct_fields__)
    assert ALL_AT_ONCE.keys() <= CASES.keys()


@pytest.mark.parametrize("backend", ["in process", "json", "msgpack"], indirect=True)
async def test_all_parameters_at_once(backend: Backend) -> None:
    want = expected(**ALL_AT_ONCE)
    variable = await generated(backend, **ALL_AT_ONCE, top_logprobs=2)
    assert (variable.text, variable.finish_reason) == (want.text, want.reason)
    assert len(variable.logprobs) == len(variable.top_logprobs) == len(want.ids)


@pytest.mark.parametrize("count", [1, 5, 20])
async def test_the_likeliest_tokens_are_reported(backend: Backend, count: int) -> None:
    variable = await generated(backend, ignore_eos=True, top_logprobs=count)
    assert (len(variable.logprobs), len(variable.top_logprobs)) == (MOST, MOST)
    for index, top in enumerate(variable.top_logprobs):
        logits = logits_after([*PROMPT_IDS, *OPEN.ids[:index]]).astype(float)
        exact = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-exact, kind="stable")[:count].tolist()
        assert [one.token_id for one in top] == best
        assert [one.text for one in top] == [TOKENIZER.decode([i], skip_special=False) for i in best]
        assert [one.logprob for one in top] == pytest.approx(exact[best].tolist(), rel=1e-4)
        assert variable.logprobs[index] == top[0].logprob  # greedy


async def test_a_token_that_was_encoded_anew_has_no_likeliest_tokens(backend: Backend) -> None:
    """A stop that begins within a token leaves a rest that the model did not write as it stands."""
    long = next(i for i in PLAIN_IDS if len(TOKENIZER.decode([i])) >= 3)
    word = TOKENIZER.decode([long])
    options = {"ignore_eos": True, "logit_bias": {long: 100}, "max_tokens": 3}
    variable = await generated(backend, **options, stop=word[1:], logprobs=True, top_logprobs=1)
    assert variable.text == word[0]
    assert variable.logprobs == variable.top_logprobs == (None,)


async def test_only_logprobs(backend: Backend) -> None:
    variable = await generated(backend, ignore_eos=True, logprobs=True)
    assert (len(variable.logprobs), variable.top_logprobs) == (MOST, None)


async def test_a_hostile_regex_fails_its_own_gen_only(backend: Backend) -> None:
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        long = {"max_tokens": 200, "ignore_eos": True}
        s += PROMPT + af.gen("x", **long, stop_regex=r"(?:(?:.|\s)+)+[éü]")
        other += PROMPT + af.gen("y", **long)
        with pytest.raises(af.errors.RequestRefused, check=has_param("stop_regex")):
            await s["x"]
        assert await other["y"] == expected(**long).text


async def test_parameters_that_the_model_cannot_apply_are_rejected(backend: Backend) -> None:
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += PROMPT + af.gen("x", logit_bias={10**6: 1})
        with pytest.raises(af.errors.BadArgument, match=r"\b1000000\b", check=has_param("logit_bias")):
            await s["x"]
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += PROMPT + af.gen("x", stop_regex="a*")
        with pytest.raises(af.errors.BadArgument, check=has_param("stop_regex")):
            await s["x"]
