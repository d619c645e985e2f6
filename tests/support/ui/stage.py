"""A real server whose generator writes the texts of a test, at its command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Conversation, ReplyWriter, TextPiece
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.images import Image
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, Generator, OnText, Scored
from agentflow.server.app import Access
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import RunningServer, running_server

ResultT = TypeVar("ResultT")


class _Reasoning(str):
    """A piece that the model thinks."""


class _End(str):
    """The finish reason, which ends a generation."""


def _usage(context: ScriptedContext, text: str, reasoning: str) -> Usage:
    """A word is a token."""
    num_reasoning = len(reasoning.split())
    num_output = len(text.split()) + num_reasoning
    return Usage(len(context.text.split()), 0, num_output, reasoning_tokens=num_reasoning)


@dataclass(eq=False)
class _Line:
    """A generation that waits for its text."""

    prompt: str
    pieces: anyio.abc.ObjectSendStream[str]


class StagedGenerator(ScriptedGenerator):
    """A generation whose prompt contains a key of ``texts`` immediately answers with its text, and with the
    last key's text if there are several. Others stream the texts of ``say`` until ``end``. A select takes its
    first choice. Without ``roles``, it has no turns, like a model without a chat template, and without
    ``images`` it reads only text. ``seen``: the images of its prompts."""

    def __init__(self, *, roles: bool = True, images: bool = True) -> None:
        super().__init__(lambda prompt: "scripted")
        self.capabilities = msgspec.structs.replace(self.capabilities, images=images)
        if not roles:
            self.capabilities = msgspec.structs.replace(self.capabilities, roles=False, conversations=False)
        self.seen: list[Image] = []
        self.texts: dict[str, str] = {}
        self.lines: list[_Line] = []
        self.changed = anyio.Event()

    def begin_role(
        self, context: ScriptedContext, role: str, tool_call_id: str | None = None, name: str | None = None
    ) -> None:
        """Opens the turn, like an engine."""
        if not self.capabilities.roles:
            raise NotSupported("this model has no chat template: use plain text instead of roles")
        super().begin_role(context, role, tool_call_id, name)

    def image(self, context: ScriptedContext, image: Image) -> None:
        """Reads the image, like a model with vision."""
        super().image(context, image)
        self.seen.append(image)

    async def converse(self, context: ScriptedContext, conversation: Conversation) -> None:
        """Reads the images, like a model with vision."""
        await super().converse(context, conversation)
        self.seen += [medium for medium in conversation.media if isinstance(medium, Image)]

    async def generate(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        text, reasoning, finish = await self._staged(context, on_text, on_reasoning)
        return Generated(text, finish, _usage(context, text, reasoning), reasoning=reasoning or None)

    async def reply(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        writer = ReplyWriter()
        written: list[str] = []

        def write(delta: str) -> None:
            written.append(writer.push([TextPiece(delta)]))
            on_text(written[-1])

        text, reasoning, finish = await self._staged(context, write, on_reasoning)
        notation = "".join(written) + writer.finish()
        return Generated(notation, finish, _usage(context, text, reasoning), reasoning=reasoning or None)

    async def score(self, context: ScriptedContext, choices: Sequence[str], method: str) -> Scored:
        """The first choice, immediately."""
        await anyio.lowlevel.checkpoint()
        context.text += choices[0]
        scores = tuple(-1.0 - index for index in range(len(choices)))
        return Scored(0, scores, Usage(len(context.text.split()), 0, 0))

    async def _staged(
        self, context: ScriptedContext, on_text: OnText, on_reasoning: OnText | None
    ) -> tuple[str, str, str]:
        keys = [key for key in self.texts if key in context.text]
        if keys:
            known = self.texts[max(keys, key=context.text.rfind)]  # the latest turn of a conversation
            await anyio.lowlevel.checkpoint()
            context.text += known
            on_text(known)
            return known, "", "stop"
        send, receive = anyio.create_memory_object_stream[str](1000)
        line = _Line(context.text, send)
        self.lines.append(line)
        self.num_running += 1
        self._change()
        said = reasoning = ""
        finish = "stop"
        try:
            with send, receive:
                async for piece in receive:
                    if isinstance(piece, _End):
                        finish = str(piece)
                        break
                    if isinstance(piece, _Reasoning):
                        reasoning += piece
                        if on_reasoning is not None:
                            on_reasoning(piece)
                        continue
                    said += piece
                    context.text += piece
                    on_text(piece)
        finally:
            self.lines.remove(line)
            self.num_running -= 1
            self._change()
        return said, reasoning, finish

    def _change(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


@dataclass
class Stage:
    """``url``: of the server. ``to`` chooses the generations whose prompt contains it; "": all of them."""

    url: str
    _generator: StagedGenerator
    _server: RunningServer
    _portal: BlockingPortal

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.url.rpartition(":")[2])

    def answer(self, to: str, text: str) -> None:
        """From now on, generations whose prompt contains ``to`` immediately get this text."""
        self._call(self._generator.texts.__setitem__, to, text)

    def say(self, text: str, to: str = "") -> None:
        """Streams a piece of text. Some generation must wait for it."""
        self._send(text, to)

    def think(self, text: str, to: str = "") -> None:
        """Streams a piece of the model's reasoning, like ``say``."""
        self._send(_Reasoning(text), to)

    def end(self, to: str = "", finish: str = "stop") -> None:
        """Ends generations, successfully, and waits until they have."""
        ending = self._send(_End(finish), to)
        self._wait_until(lambda: not any(line in ending for line in self._generator.lines))

    def forget_answers(self) -> None:
        """Prompts are answered as the test says again, none immediately."""
        self._call(self._generator.texts.clear)

    def end_all(self) -> None:
        """Ends the generations that are left, if any, until none follows."""
        while self.running():
            self.end()

    @property
    def seen(self) -> list[Image]:
        """The images of all prompts, in order."""
        return self._call(lambda: list(self._generator.seen))

    def running(self, to: str = "") -> int:
        """Generations that wait for text."""
        return self._call(lambda: sum(to in line.prompt for line in self._generator.lines))

    def wait_running(self, count: int, to: str = "") -> None:
        """Waits until ``count`` generations wait for text."""
        self._wait_until(lambda: sum(to in line.prompt for line in self._generator.lines) == count)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        async def wait() -> None:
            with anyio.fail_after(20):
                while not is_so():
                    await self._generator.changed.wait()

        self._portal.call(wait)

    def _send(self, piece: str, to: str) -> list[_Line]:
        """Returns the generations that get it."""

        def send() -> list[_Line]:
            lines = [line for line in self._generator.lines if to in line.prompt]
            for line in lines:
                line.pieces.send_nowait(piece)
            return lines

        lines = self._call(send)
        assert lines, f"no generation waits for text after {to!r}"
        return lines

    def _call(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        return self._portal.call(function, *args)


@contextmanager
def open_stage(
    limits: ServerLimits | None = None,
    access: Access | None = None,
    *,
    roles: bool = True,
    images: bool = True,
    port: int = 0,
    model: str = "scripted",
) -> Iterator[Stage]:
    """A server. ``port``: 0 is a free one. ``roles``: whether its model has a chat template. ``images``:
    whether it sees images. ``model``: its name."""
    with start_blocking_portal("asyncio") as portal:
        generator = portal.call(lambda: StagedGenerator(roles=roles, images=images))
        generator.capabilities = msgspec.structs.replace(generator.capabilities, model=model)

        @asynccontextmanager
        async def open_this() -> AsyncIterator[Generator[Any]]:
            yield generator

        running = running_server(one_model(open_this), port=port, limits=limits, access=access)
        with portal.wrap_async_context_manager(running) as server:
            yield Stage(server.url.replace("ws://", "http://"), generator, server, portal)
