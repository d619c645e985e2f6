"""The inputs of a map: read one by one from any iterable, and turned into the program's arguments."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sized
from typing import Any, Final, TypeAlias, TypedDict, TypeVar

from agentflow.errors import BadArgument

ItemT = TypeVar("ItemT")

ManyOf: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Inputs: TypeAlias = ManyOf[Any]


class MapOptions(TypedDict, total=False):
    """What ``map`` takes besides; see there."""

    concurrency: int
    progress: bool


END: Final = object()
MAX_REPR = 120


class MapInputs:
    """Reads ``inputs`` once, from front to back. ``total``: how many there are, where that is known."""

    def __init__(self, inputs: Inputs) -> None:
        if isinstance(inputs, str | bytes | Mapping):
            raise BadArgument(
                f"map: the inputs are a {type(inputs).__name__}, which is one input: "
                "give a list (or another iterable) of inputs"
            )
        self.total = _length(inputs)
        self._source: AsyncIterator[Any] | Iterator[Any]
        if isinstance(inputs, AsyncIterable):
            self._source = aiter(inputs)
            return
        try:
            self._source = iter(inputs)
        except TypeError as error:
            raise BadArgument(
                f"map: inputs {short(inputs)} cannot be iterated: give a list, a generator, "
                "or an async iterable of inputs"
            ) from error

    async def read(self) -> Any:
        """The next input, or ``END``."""
        if isinstance(self._source, AsyncIterator):
            try:
                return await anext(self._source)
            except StopAsyncIteration:
                return END
        return next(self._source, END)

    async def close(self) -> None:
        """No more will be read: a generator gets to clean up now, not when it is collected."""
        if inspect.isasyncgen(self._source):
            await self._source.aclose()
        elif inspect.isgenerator(self._source):
            self._source.close()


def arguments_of(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a program is called with for one input: a tuple is spread over the positional arguments, a
    dict over the keyword arguments, anything else is the one argument. Subclasses are values (a named
    tuple has a meaning of its own)."""
    if type(item) is tuple:
        return item, {}
    if type(item) is dict:
        return (), item
    return (item,), {}


def short(item: object) -> str:
    """A repr that fits a line, of any object."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = 60
    try:
        text = " ".join(shortened.repr(item).split())
    except Exception:  # an error message must not fail for what it tells of
        text = f"a {type(item).__name__} without a repr"
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 1]}…"


def _length(inputs: Inputs) -> int | None:
    if not isinstance(inputs, Sized):
        return None
    try:
        return len(inputs)
    except (TypeError, NotImplementedError):  # a collection that does not know before it is read
        return None
