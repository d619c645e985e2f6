"""Constraints on their way to an engine process: whole once, by their keys after that."""

from __future__ import annotations

import anyio
import pytest
from support.process_engine import process_engine

from agentflow.engine.client import EngineClient
from agentflow.engine.constrained.grammar_cache import MAX_GRAMMARS
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.process import connection
from agentflow.engine.request import Submit
from agentflow.protocol.sampling import SamplingParams


def constraint(word: str) -> CompiledConstraint:
    return CompiledConstraint(word, "dfa", build_dfa(parse_regex(word)).to_bytes())


async def text(client: EngineClient, word: str) -> str:
    end = await client.generate(
        [5, 6],
        SamplingParams(max_tokens=20),
        seed=0,
        on_text=lambda text: None,
        constraint=constraint(word),
    )
    return end.text


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The constraint key of each request that is sent to the process, and whether it includes the payload."""
    written: list[tuple[str, bool]] = []
    to_frame = connection.to_frame

    def noted(content: object) -> bytes:
        if isinstance(content, Submit) and content.constraint is not None:
            written.append((content.constraint.key, bool(content.constraint.payload)))
        return to_frame(content)

    monkeypatch.setattr(connection, "to_frame", noted)
    return written


@pytest.mark.anyio
async def test_a_payload_is_sent_once(payloads: list[tuple[str, bool]]) -> None:
    async with process_engine() as client:
        assert [await text(client, "yes"), await text(client, "no"), await text(client, "yes")] == [
            "yes",
            "no",
            "yes",
        ]
    assert payloads == [("yes", True), ("no", True), ("yes", False)]


@pytest.mark.anyio
async def test_an_engine_that_has_dropped_a_constraint_requests_it_again(
    payloads: list[tuple[str, bool]],
) -> None:
    async with process_engine() as client:
        assert await text(client, "first") == "first"
        async with anyio.create_task_group() as group:
            for number in range(MAX_GRAMMARS):
                group.start_soon(text, client, f"other {number}")
        assert await text(client, "first") == "first"
    assert [whole for key, whole in payloads if key == "first"] == [True, False, True]


@pytest.mark.anyio
async def test_a_request_aborted_while_its_payload_is_requested_is_over() -> None:
    async with process_engine() as client:
        client.engine._connection.sent_keys.add("never sent")
        for _ in range(20):
            with anyio.move_on_after(0):
                await text(client, "never sent")
        await client.stats()
        client.engine._connection.sent_keys.add("never sent")
        assert await text(client, "never sent") == "never sent"


@pytest.mark.anyio
async def test_a_new_process_is_sent_payloads_again(payloads: list[tuple[str, bool]]) -> None:
    async with process_engine() as client:
        assert await text(client, "yes") == "yes"
        client.engine._child._process.kill()
        assert await text(client, "yes") == "yes"
    assert [whole for _, whole in payloads][-1]
