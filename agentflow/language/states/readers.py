"""Readers of one variable's text and thoughts, from the start. No generators, so that they may be dropped
anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agentflow.language.states.run import VariableNode


class _Reader(AsyncIterator[str]):
    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._num_read = 0  # characters


class TextReader(_Reader):
    """Iterates over the text, delta by delta. Raises the variable's failure."""

    async def __anext__(self) -> str:
        node = self._node
        while len(node.text) <= self._num_read:
            if node.is_done:
                await node.settled()
                node.raise_failure()
                raise StopAsyncIteration
            await node.change()
        delta = node.text[self._num_read :]
        self._num_read += len(delta)
        return delta


class ReasoningReader(_Reader):
    """Iterates over the thoughts before the text. Ends where that begins, or with the variable."""

    async def __anext__(self) -> str:
        node = self._node
        while len(node.reasoning) <= self._num_read:
            if node.notation or node.is_done:
                raise StopAsyncIteration
            await node.change()
        delta = node.reasoning[self._num_read :]
        self._num_read += len(delta)
        return delta
