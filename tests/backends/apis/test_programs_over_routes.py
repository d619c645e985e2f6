"""The same programs on an engine in this process, over the websocket, and over the APIs of a server that runs
the same engine. All sample greedily, so results are equal wherever the route can express the program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import cascade
import evaluation
import few_shot
import long_document
import msgspec
import pytest
import react
import self_consistency
import skeleton_of_thought
from backends.apis import test_own_server_as_api as programs
from support.api_server import MODEL, ApiServer
from support.fake_engine import ConstrainedEngine
from support.logit_runner import logit_runner
from support.server.http_clients import only_asyncio
from support.server.module_servers import module_server

import agentflow as af
from agentflow.errors import AgentflowError, NotSupported, RunFailed
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

ROUTES = ("embedded", "websocket", "openai", "anthropic")


class _GreedyConnection:
    """Sends each gen with temperature 0 and without a seed."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, sent: Sequence[ops.Op]) -> None:
        self._inner.send([self._greedy(op) if isinstance(op, ops.Gen) else op for op in sent])

    def _greedy(self, op: ops.Gen) -> ops.Gen:
        params = msgspec.structs.replace(op.params, temperature=0.0, top_p=None, seed=None)
        return msgspec.structs.replace(op, params=params)


class Greedy:
    """A backend that makes all gens greedy."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self._inner.connect(deliver, lost) as connection:
            yield _GreedyConnection(connection)


@dataclass
class Verdict:
    """An object, as APIs put other values into one, after which a model may choose otherwise."""

    judge: Literal["Ann", "Bo"]
    is_good: bool


@af.program
async def typed(s: af.State) -> list[Verdict]:
    for name in ("first", "second"):
        s += af.user("Is it good?") + af.assistant(af.gen(name, schema=Verdict, max_tokens=60))
    return [await s["first"], await s["second"]]


@af.program
async def patterns(s: af.State) -> list[str]:
    s += af.user("How many?") + af.assistant(af.gen("count", regex="[0-9]{3}", max_tokens=20))
    s += af.user("Yes?") + af.assistant(af.gen("yes", grammar='start: "yes" | "no"', max_tokens=20))
    return [await s["count"], await s["yes"]]


@dataclass(frozen=True)
class Row:
    """A program with its arguments.

    Attributes:
        refused: The routes that cannot express it, why, and the ``param`` of their ``NotSupported``.
        differs: The routes on which its result is another one, and why.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...] = ()
    refused: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.program.__name__


WRITTEN = "the model writes a choice of several tokens, where an engine scores all choices"
NO_PLAIN_TEXT = {"anthropic": ("the API has turns alone", None)}
NO_LOGPROBS = {"anthropic": ("the API reports no log-probabilities", "logprobs")}
NO_PATTERNS = {"anthropic": ("the API enforces schemas alone", None)}
PARTS = ["A fox found a key.", "The key opened a door.", "Behind it was a garden."]

TABLE = [
    Row(few_shot.capital, ("Italy", few_shot.CASES)),
    Row(evaluation.brief, ("How many legs has a spider?",)),
    Row(long_document.map_reduce, (PARTS,)),
    Row(long_document.chain, (PARTS,)),
    Row(self_consistency.poll, ("What is 2 times 9?", 3)),
    Row(skeleton_of_thought.answer, ("How do I sleep well?", 3)),
    Row(react.react, ("How old is the fox?", 1), NO_PLAIN_TEXT, {"openai": WRITTEN}),
    Row(cascade.judge, (cascade.REVIEWS[0], ("", "")), {}, {"openai": WRITTEN, "anthropic": WRITTEN}),
    Row(programs.turns),
    Row(programs.branches),
    Row(programs.continued, (), {}, {"anthropic": "white space before a gen is not sent"}),
    Row(programs.stopped),
    Row(programs.plain, (), NO_LOGPROBS),
    Row(programs.scored, (), NO_LOGPROBS),
    Row(typed),
    Row(patterns, (), NO_PATTERNS),
]


def engine() -> ConstrainedEngine:
    return ConstrainedEngine(runner=logit_runner(max_context=2048))


server = module_server(engine)


def backend_of(route: str, server: ApiServer) -> Backend:
    match route:
        case "embedded":
            return engine()
        case "websocket":
            return af.Remote(server.url.replace("http", "ws"))
        case "openai":
            return af.OpenAICompatible(f"{server.url}/v1", max_retries=0)
        case _:
            return af.Anthropic(
                MODEL, base_url=server.url, api_key="any", like="claude-opus-4-5", max_retries=0
            )


async def result_of(row: Row, route: str, server: ApiServer) -> Any:
    async with af.session(backend=Greedy(backend_of(route, server))) as flow:
        return await flow.run(row.program, *row.args)


@pytest.fixture(scope="module")
def expected_results() -> dict[str, Any]:
    """The results of the programs in this process."""
    return {}


@pytest.mark.parametrize("route", ROUTES[1:])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
async def test_a_program_has_the_result_that_it_has_in_this_process(
    server: ApiServer, expected_results: dict[str, Any], row: Row, route: str
) -> None:
    if route in row.refused:
        with pytest.raises(AgentflowError) as caught:
            await result_of(row, route, server)
        # The later ops of the state fail because of it.
        error = caught.value.__cause__ if isinstance(caught.value, RunFailed) else caught.value
        assert isinstance(error, NotSupported)
        assert error.param == row.refused[route][1]
        return
    found = await result_of(row, route, server)
    if row.name not in expected_results:
        expected_results[row.name] = await result_of(row, "embedded", server)
    expected = expected_results[row.name]
    if route in row.differs:
        assert type(found) is type(expected)
    else:
        assert found == expected
