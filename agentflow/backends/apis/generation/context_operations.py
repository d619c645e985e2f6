"""The operations of a ``Generator`` behind an API that only change a context, and those that no API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Conversation, ToolChoice, ToolSpec
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, Video
from agentflow.runtime.generator import Upcoming


class ContextOperations:
    """The base of the generators of one model and of several."""

    uses_scheduling = False
    """Whether scheduling hints have an effect."""
    capabilities: Capabilities

    def fill(self, context: ApiContext, text: str) -> None:
        """Appends text."""
        context.fill(text)

    def begin_role(
        self, context: ApiContext, role: str, tool_call_id: str | None = None, name: str | None = None
    ) -> None:
        """Opens a turn. ``NotSupported`` after plain text."""
        context.leave_ahead()
        context.begin_role(role, (tool_call_id, name))

    def end_role(self, context: ApiContext) -> None:
        """Closes the turn."""
        context.leave_ahead()
        context.end_role()

    def image(self, context: ApiContext, image: Image) -> None:
        """Appends an image."""
        context.show(image)

    def video(self, context: ApiContext, video: Video) -> None:
        """Appends a video."""
        context.show(video)

    async def converse(self, context: ApiContext, conversation: Conversation) -> None:
        """Begins the context with a conversation."""
        context.converse(conversation)

    async def offer_tools(self, context: ApiContext, tools: tuple[ToolSpec, ...], choice: ToolChoice) -> None:
        """Replaces the tools that replies may call."""
        context.tools, context.choice = tools, choice

    async def fork(self, context: ApiContext, count: int) -> list[ApiContext]:
        """Contexts that share the messages, and at temperature 0 the text of a call that went on."""
        context.share()
        forks = [context.forked() for _ in range(count)]
        ahead = context.ahead
        if ahead is not None and ahead.is_greedy:
            for fork in forks:
                fork.ahead, fork.is_ahead_inherited = ahead, True
            ahead.num_users += count
        return forks

    def expect(self, context: ApiContext, upcoming: Sequence[Upcoming]) -> None:
        """Receives the text and gens that follow the next gen in its turn."""
        context.upcoming = upcoming

    def text(self, context: ApiContext) -> str:
        """The content, with turns as ``<role>…</role>``."""
        return context.text()

    async def token_ids(self, context: ApiContext) -> list[int]:
        """``NotSupported``."""
        raise NotSupported(f"{self.capabilities.model} is behind an API that reports no token ids")

    async def token_texts(self, context: ApiContext) -> list[str]:
        """``NotSupported``."""
        raise NotSupported(f"{self.capabilities.model} is behind an API that reports no tokens")

    def watching(self) -> NoReturn:
        """``NotSupported``."""
        raise NotSupported(f"{self.capabilities.model} is behind an API: its scheduler cannot be watched")

    def free(self, context: ApiContext) -> None:
        """Ends a call that nothing needs any more. The server keeps no state."""
        context.leave_ahead()
