"""Calls that get the answers of others by reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.integrations import Answer, ModelConnection, WiredProgram


class Prompts(ScriptedGenerator):
    """Keeps the prompts of all replies."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "\nred\ngreen" if "Name" in prompt else f"{len(prompt)} characters")
        self.prompts: list[str] = []

    async def reply(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        self.prompts.append(context.text)
        return await super().reply(context, *args, **kwargs)


@pytest.fixture
def generator() -> Prompts:
    return Prompts()


@pytest.fixture
def connection(generator: Prompts) -> Iterator[ModelConnection]:
    backend = af.Scripted([])
    backend.generator = generator
    connection = ModelConnection(lambda: af.session(backend=backend))
    yield connection
    connection.close()


def test_a_prompt_has_the_text_of_a_reference(connection: ModelConnection, generator: Prompts) -> None:
    async def run() -> tuple[str, Answer]:
        program = WiredProgram(connection, "colours")
        try:
            named = await program.call([af.user("Name two.")], af.reply("answer"))
            first = named.first_line()
            praised = await program.call([af.user("Praise ", first, ".")], af.reply("answer"))
            return await program.text(first), await program.answer(praised)
        finally:
            program.close()

    text, answer = connection.shared.loop.run(run)
    assert text == "red"
    assert generator.prompts[1] == "<user>Praise red.</user><assistant>"
    assert "35 characters" in answer.text


def test_a_call_has_a_deadline(connection: ModelConnection) -> None:
    async def run() -> None:
        program = WiredProgram(connection)
        try:
            variable = await program.call([af.user("Name two.")], af.reply("answer"), deadline_s=1e-9)
            await program.answer(variable)
        finally:
            program.close()

    with pytest.raises(af.errors.DeadlineExceeded):
        connection.shared.loop.run(run)
