"""The inputs of a map: any iterable, or the rows of a table, and how each becomes the program's arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias, TypeVar, get_origin, get_type_hints

from agentflow.errors import BadArgument, short_repr
from agentflow.language.failures.user_code import UserCode
from agentflow.language.graphs.graph import Graph
from agentflow.protocol.record import Record

ItemT = TypeVar("ItemT")


class Table(Protocol):
    """A dataframe: pandas, polars, pyarrow, or another type that exports Arrow data."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


ManyOf: TypeAlias = Iterable[ItemT] | AsyncIterable[ItemT]
Inputs: TypeAlias = ManyOf[Any] | Table

InputKey: TypeAlias = str | int
KeyOf: TypeAlias = str | Callable[[Any], InputKey]
"""A field of the inputs, or a function of an input."""

END: Final = object()


class TableRow(dict[str, Any]):
    """A row of a table. Columns that are not among the program's parameters are not passed to it."""


def program_function(program: Any) -> Any:
    """The function behind a program, which has its annotations and its source."""
    while isinstance(program, functools.partial):
        program = program.func
    return inspect.unwrap(program)


class MapInputs:
    """Reads ``inputs`` once, in order. ``total``: their number, or None if it is unknown."""

    def __init__(self, inputs: Inputs) -> None:
        if isinstance(inputs, str | bytes | Mapping | Record):
            raise BadArgument(
                f"map: the inputs are a {type(inputs).__name__}, which is one input: "
                "give a list (or another iterable) of inputs",
                param="inputs",
            )
        self.total = _length(inputs)
        self._source: AsyncIterator[Any] | Iterator[Any]
        if is_table(inputs):
            self._source = iterate_rows(inputs)
            return
        if isinstance(inputs, AsyncIterable):
            self._source = aiter(inputs)
            return
        try:
            self._source = iter(inputs)  # type: ignore[arg-type]
        except TypeError as error:
            raise BadArgument(
                f"map: inputs {short_repr(inputs)} cannot be iterated: give a list, a generator, "
                "a dataframe, or an async iterable of inputs",
                param="inputs",
            ) from error

    async def read(self) -> Any:
        """The next input, or ``END``."""
        with UserCode("reading the inputs"):
            if isinstance(self._source, AsyncIterator):
                try:
                    return await anext(self._source)
                except StopAsyncIteration:
                    return END
            return next(self._source, END)

    async def close(self) -> None:
        """Closes a generator now, instead of when it is garbage-collected."""
        with UserCode("closing the inputs"):
            if inspect.isasyncgen(self._source):
                await self._source.aclose()
            elif inspect.isgenerator(self._source):
                self._source.close()


def _length(inputs: Any) -> int | None:
    if not isinstance(inputs, Sized):
        return None
    try:
        return len(inputs)
    except (TypeError, NotImplementedError):  # a collection that knows its length only after reading
        return None


def is_table(inputs: Any) -> bool:
    """Whether it is a dataframe. A single column is not one; iterating over it gives its values."""
    is_frame = hasattr(inputs, "__arrow_c_stream__") or hasattr(inputs, "__dataframe__")
    # Without __getattr__, by which pandas gives the columns: one may have the name "type".
    kinds = [inspect.getattr_static(inputs, name, None) for name in ("dtype", "type")]
    return is_frame and kinds == [None, None]


def iterate_rows(table: Any) -> Iterator[TableRow]:
    """The rows of a dataframe, with None for missing values. A dataframe's own iteration over rows gives the
    exact values; others are read through Arrow, by nanoarrow."""
    if callable(getattr(table, "iter_rows", None)):  # polars
        for row in table.iter_rows(named=True):
            yield TableRow(row)
    elif callable(getattr(table, "itertuples", None)):  # pandas
        names = [str(name) for name in table.columns]
        rows = table.itertuples(index=False, name=None)
        missing = table.isna().itertuples(index=False, name=None)
        for values, gaps in zip(rows, missing, strict=True):
            pairs = zip(names, values, gaps, strict=True)
            yield TableRow({name: None if is_missing else value for name, value, is_missing in pairs})
    elif callable(getattr(table, "to_batches", None)):  # pyarrow
        for batch in table.to_batches():
            yield from map(TableRow, batch.to_pylist())
    else:
        yield from _arrow_rows(table)


def _arrow_rows(table: Any) -> Iterator[TableRow]:
    try:
        nanoarrow = importlib.import_module("nanoarrow")
    except ImportError:
        raise BadArgument(
            f"map: to read a {type(table).__name__}, install nanoarrow, or give its rows as dicts",
            param="inputs",
        ) from None
    for chunk in nanoarrow.ArrayStream(table):
        yield from map(TableRow, chunk.to_pylist())


class Parameters:
    """The parameters of a program after its state."""

    def __init__(self, program: Any) -> None:
        self._required: list[str] = []
        self._positional: list[str] = []
        self._names: set[str] | None = set()  # None: any
        self._takes_row = False
        if isinstance(program, Graph):
            self._positional = self._required = list(program.parameters)
            self._names = set(program.parameters)
            return
        try:
            parameters = list(inspect.signature(program).parameters.values())[1:]
        except (TypeError, ValueError):
            parameters = []
            self._names = None
        with suppress(Exception):  # an annotation may be undefined here
            kinds = [
                get_type_hints(program_function(program)).get(parameter.name) for parameter in parameters
            ]
            self._takes_row = len(kinds) == 1 and (get_origin(kinds[0]) or kinds[0]) is dict
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self._names = None
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._positional.append(parameter.name)
                if parameter.default is parameter.empty:
                    self._required.append(parameter.name)
                if self._names is not None:
                    self._names.add(parameter.name)

    def arguments(self, item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The program's arguments for one input: a tuple becomes its positional arguments, a dict its keyword
        arguments, a row the arguments that are columns, or the whole row if a dict is the one parameter, and
        anything else the one argument. Instances of subclasses, such as named tuples, are values.
        ``BadArgument`` if a row lacks a column."""
        if type(item) is tuple:
            return item, {}
        if type(item) is dict:
            return (), item
        if not isinstance(item, TableRow):
            return (item,), {}
        if self._takes_row:
            return (dict(item),), {}
        for name in self._required:
            if name not in item:
                columns = ", ".join(map(repr, item)) or "none"
                raise BadArgument(
                    f"the program takes {name!r}, and the input has no such column (it has: {columns})",
                    param=name,
                )
        return (), {name: value for name, value in item.items() if self._names is None or name in self._names}

    def columns(self, item: Any) -> dict[str, Any]:
        """One input as columns, under its own names, or else under the names of the program's parameters."""
        if isinstance(item, dict):
            return dict(item)
        values = item if type(item) is tuple else (item,)
        if len(values) > len(self._positional):
            return {"input": item}
        return dict(zip(self._positional, values, strict=False))
