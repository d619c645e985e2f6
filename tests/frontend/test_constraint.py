"""Constraints that a backend cannot keep: the client refuses before anything runs, and so does a server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from observed_backends import Noted
from wire_server import ThreadServer, thread_server

import agentflow as af
from agentflow import ops
from agentflow.constraint import Constraint
from agentflow.generator import Capabilities

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    with thread_server() as running:
        yield running


KINDS = {
    "regex": {"regex": "a+"},
    "schema": {"schema": {"type": "object"}},
    "choices": {"choices": ["a"]},
    "grammar": {"grammar": "start: a"},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_backend_that_cannot_keep_it_refuses_before_anything_is_submitted(kind):
    backend = af.Scripted(["a"])
    others = tuple(other for other in KINDS if other != kind)
    backend.generator.capabilities = Capabilities("small", constraints=others)
    noted = Noted(backend)
    async with af.session(backend=noted) as flow, flow.state() as s:
        told = rf"small cannot generate under a constraint of the kind '{kind}' \(it can: {', '.join(others)}"
        with pytest.raises(af.NotSupported, match=told):
            s += af.user("first") + af.assistant(af.gen("r", **KINDS[kind]))
        assert noted.ops == [ops.Open(s.id)]
        assert await s.messages() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_cannot_keep_it_refuses_what_is_sent_anyway(server, kind):
    able = server.generator.capabilities
    unable = msgspec.structs.replace(able, constraints=())
    async with af.session(server.url) as flow, flow.state() as s:
        await s
        server.call(lambda: setattr(server.generator, "capabilities", unable))
        try:
            s += "a" + af.gen("r", **KINDS[kind])
            with pytest.raises(af.NotSupported, match=rf"a constraint of the kind '{kind}' \(it can: none\)"):
                await s["r"]
        finally:
            server.call(lambda: setattr(server.generator, "capabilities", able))
    await server.wait_until_idle()


async def test_a_constraint_that_a_wire_client_made_up_fails_its_state(server):
    async with af.session(server.url) as flow, flow.state() as s:
        bad = Constraint("choices", choices=("a", "a"))
        gen = ops.Gen(s.id, flow.next_id(), "bad", af.gen("bad").params, bad)
        flow.send([gen])
        s += "more"
        with pytest.raises(af.BadArgument, match="choices: 1 to 1000 of them, each once"):
            await s
    await server.wait_until_idle()
