"""A client that vanishes while its constraint is being compiled leaves nothing behind and delays no other."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest
from support import compile_loaders
from support.asgi_peer import NO_GRACE, Bench, connected
from support.fake_engine import TEMPLATE
from support.holds import Hold
from support.plain_model import plain_model_engine
from support.session_peer import gen

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from agentflow.protocol import ops
from agentflow.protocol.constraint import Constraint
from agentflow.server.websocket.sessions import open_sessions

pytestmark = pytest.mark.anyio


@pytest.mark.trio_in_full
async def test_a_client_that_vanishes_mid_compile_leaves_nothing(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    slow = msgspec.structs.replace(gen(1, 2), constraint=Constraint("regex", f"hold {hold.path}"))
    async with (
        plain_model_engine() as client,
        constraint_compiler(loader=compile_loaders.LOADER) as compiler,
        open_sessions(NO_GRACE) as sessions,
        connected(Bench(EngineGenerator(client, TEMPLATE, compiler=compiler), sessions)) as [peer],
    ):
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("a text",)), slow)
        await hold.reached()
        before = compiler.pid
        peer.hang_up()
        with anyio.fail_after(10):
            await sessions.wait_until_empty()
        # The stopped process is not waited for: the next one answers.
        compiled = await compiler.compile(Constraint("regex", "pid"), tenant="another")
        assert int(compiled.payload) == compiler.pid != before
        hold.release()
        assert (compiler.counts.killed, compiler.counts.compiled) == (1, 1)
        assert (await client.stats()).steps == 0  # nothing was submitted
