"""The requests that an engine's client has sent, as its observer."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from support.fake_engine import TOKENIZER

from agentflow.engine.messages import FromEngine
from agentflow.engine.request import Submit


class SentRequests:
    """Register it with ``client.observe`` or ``generator.observe``."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self._changed: anyio.Event | None = None

    def sent(self, submit: Submit) -> None:
        self.submits.append(submit)
        if self._changed is not None:
            self._changed.set()

    def received(self, messages: Sequence[FromEngine]) -> None:
        pass

    @property
    def prompt(self) -> str:
        """The text of the latest request's prompt."""
        return TOKENIZER.decode(self.submits[-1].token_ids, skip_special=False)

    async def wait_for(self, number: int) -> None:
        """Waits until this many requests have been sent. In the engine client's event loop."""
        with anyio.fail_after(20):
            while len(self.submits) < number:
                self._changed = anyio.Event()
                await self._changed.wait()
