"""A variable: a value that is still being made, as its readers see it.

One shared text, thin readers: awaiting gives the whole value, iterating gives the text as it comes
(from the start, however late the reader), appending it to a state passes it by reference.

What stands for a value that is still being made, wherever it may be used: a variable, or what
transforms make of one.

It can be awaited, appended, put into an f-string, added to text, and transformed; it is passed on by
reference. It is not the value: to compare or to measure it, await it first.

The readers of one variable: of its text as it comes, and of the parts of its value.

They hold no queue: a slow reader gets one larger step. Not generators: they may be left at any point.

Partial values: what a JSON text that still grows says already.

What is shown never changes later: strings and lists grow, records get more fields, and what could still
become something else (``12`` of ``123``, ``tr`` of ``true``) is left out until it is complete.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import anyio
import jiter

from agentflow.errors import BadArgument, InvalidValue
from agentflow.language.expressions import Expression
from agentflow.language.values import TEXT, ValueType
from agentflow.protocol.chat import CalledTool, Reply, ReplySoFar
from agentflow.protocol.events import ErrorInfo, TopLogprobs, Usage, Value
from agentflow.protocol.transform import Transform, TransformName, apply_in_turn, check_transforms

if TYPE_CHECKING:
    from agentflow.language.recorder import ProgramLine
    from agentflow.language.state import State
    from agentflow.language.tags import Tagged


ValueT = TypeVar("ValueT")
ValueT_co = TypeVar("ValueT_co", covariant=True)


class Reference(Expression, Generic[ValueT_co]):
    """``source`` is the variable behind it; ``transforms`` are applied to its text on the way."""

    source: Variable[Any]
    transforms: tuple[Transform, ...]

    @property
    @abstractmethod
    def shown_name(self) -> str:
        """How messages name it. For errors."""

    @property
    @abstractmethod
    def marker_id(self) -> int:
        """Its number, unique in the session. For markers."""

    @abstractmethod
    def __await__(self) -> Generator[object, None, ValueT_co]:
        """Its value; raises what failed."""

    def strip(self) -> Transformed:
        """Without white space at both ends.

        >>> await s.set("x", "  yes ").strip()
        'yes'
        """
        return self._then("strip")

    def lower(self) -> Transformed:
        """In lower case.

        >>> await s.set("x", "Yes").lower()
        'yes'
        """
        return self._then("lower")

    def upper(self) -> Transformed:
        """In upper case.

        >>> await s.set("x", "yes").upper()
        'YES'
        """
        return self._then("upper")

    def first_line(self) -> Transformed:
        """Its first line with anything on it, stripped.

        >>> await s.set("x", "\\n Yes.\\nFor three reasons.").first_line()
        'Yes.'
        """
        return self._then("first_line")

    def json(self, path: str = "") -> Transformed:
        """What stands at ``path`` (``"a.b.0"``; all of it by default) in its text, which is JSON: strings
        as they are, anything else as JSON. ``RunFailed`` where there is no such thing.

        >>> record = s.set("record", '{"name": "Ada", "born": {"year": 1815}}')
        >>> await record.json("born.year")
        '1815'
        """
        return self._then("json", path)

    def regex(self, pattern: str) -> Transformed:
        """What ``pattern`` finds first in its text: its first group, where it has groups. ``RunFailed`` where
        it finds nothing, ``BadArgument`` (at once) where it is no pattern.

        >>> await s.set("x", "I give it 8 of 10.").regex(r"(\\d+) of 10")
        '8'
        """
        return self._then("regex", pattern)

    def map(self, function: Callable[[ValueT_co], str]) -> Variable[str]:
        """What ``function`` makes of its value, which must be a string. It runs in this process, and its
        result is sent on: a round trip that the named transforms save.

        >>> await s["answer"].map(lambda text: text.replace("sugar", "food"))
        'Plants turn light into food.'
        """
        return self.source.state.mapped(self, function)

    def _then(self, name: TransformName, argument: str = "") -> Transformed:
        transforms = (*self.transforms, Transform(name, argument))
        check_transforms(transforms)
        self.source.state.session.markers.refuse([argument], f"{name}: its argument")
        return self.source.transformed(transforms)

    def __format__(self, spec: str) -> str:
        if spec:
            raise BadArgument(
                f"{self.shown_name} is passed on by reference and cannot be formatted with {spec!r}: "
                "use a plain {…}, or await it and format its value"
            )
        return self.source.state.session.markers.mark(self)

    def __str__(self) -> str:
        raise BadArgument(
            f"str() of {self.shown_name}: await it for its value, or append it (or an f-string with it) "
            "to a state to pass it on unawaited"
        )

    def __bool__(self) -> NoReturn:
        self._refuse("asked whether it is true")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            self._refuse("compared")
        return self is other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __len__(self) -> NoReturn:
        self._refuse("measured")

    def __contains__(self, item: object) -> NoReturn:
        self._refuse("searched")

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse("taken apart")

    def _refuse(self, what: str) -> NoReturn:
        raise BadArgument(f"{self.shown_name} is no value yet and cannot be {what}: await it first")


class Transformed(Reference[str]):
    """A variable's text after some transforms. Made by ``s["x"].strip()`` and the like.

    >>> s += af.user("Answer in capitals: ", s["answer"].first_line().upper())
    >>> print(await s["answer"].first_line().upper())
    PLANTS TURN LIGHT INTO SUGAR.
    """

    def __init__(self, source: Variable[Any], transforms: tuple[Transform, ...]) -> None:
        self.source = source
        self.transforms = transforms
        self._marker_id = source.state.session.next_id()

    @property
    def marker_id(self) -> int:
        return self._marker_id

    def __repr__(self) -> str:
        return f"<{self.shown_name}>"

    @property
    def shown_name(self) -> str:
        steps = "".join(
            [f".{t.name}({t.argument!r})" if t.argument else f".{t.name}()" for t in self.transforms]
        )
        return f"variable {self.source.name!r}{steps}"

    def __await__(self) -> Generator[object, None, str]:
        return self._wait().__await__()

    async def _wait(self) -> str:
        return await apply_in_turn(await self.source.whole_text(), self.transforms)


_NUMBER_CHARS = "0123456789+-.eE"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""A string, and the mark that ends it if it has one."""


class NothingYet(ValueError):
    """There is no part of a value to be shown."""


def partial_value(text: str) -> Any:
    """The part of a JSON value that ``text``, its beginning, is certain to be of. ``NothingYet`` where there
    is none (or where ``text`` is no beginning of JSON).

    >>> partial_value('{"title": "Leav')
    {'title': 'Leav'}
    """
    try:
        # A lone half of a character pair cannot be encoded; no engine writes one.
        data = _without_open_number(text).encode()
        return jiter.from_json(data, partial_mode="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise NothingYet(str(error)) from None


def whole_value(text: str) -> Any:
    """The value of a complete text. ``ValueError`` where it is no JSON."""
    return json.loads(text)


def _without_open_number(text: str) -> str:
    """Without a number at the end that more digits may follow."""
    before = text.rstrip(_NUMBER_CHARS)
    has_digits = any(char.isdigit() for char in text[len(before) :])
    is_in_string = "" in _STRING.findall(before)
    return before if has_digits and not is_in_string else text


_NOTHING = object()


class TextReader(AsyncIterator[str]):
    """Gives the text, delta by delta, from the start."""

    def __init__(self, variable: Variable[Any]) -> None:
        self._variable = variable
        self._num_heard = 0

    async def __anext__(self) -> str:
        variable = self._variable
        while len(variable.text) <= self._num_heard:
            if variable.is_done:
                variable.raise_failure()
                raise StopAsyncIteration
            await variable.change()
        delta = variable.text[self._num_heard :]
        self._num_heard += len(delta)
        return delta


class PartialReader(AsyncIterator[Any]):
    """Gives the value as far as it is there (``Variable.so_far``), each time further than before; the whole
    value is the last."""

    def __init__(self, variable: Variable[Any]) -> None:
        self._variable = variable
        self._num_heard = 0
        self._shown: Any = _NOTHING
        self._is_over = False

    async def __anext__(self) -> Any:
        variable = self._variable
        while not self._is_over:
            if len(variable.notation) > self._num_heard:
                self._num_heard = len(variable.notation)
                try:
                    partial = variable.so_far()
                except NothingYet:
                    continue
                if self._is_further(partial):
                    return partial
            elif not variable.is_done:
                await variable.change()
            else:
                self._is_over = True
                variable.value_now()  # raises for a text that is no value, or a part of one
                if self._is_further(variable.so_far(is_whole=True)):
                    return self._shown
        raise StopAsyncIteration

    def _is_further(self, value: Any) -> bool:
        is_further = self._shown is _NOTHING or bool(value != self._shown)
        self._shown = value
        return is_further


class Variable(Reference[ValueT_co]):
    """The value of one ``gen``, ``select`` or ``set``. Made by states; ``s["x"]`` finds it.

    Await it for its value, iterate it for its text as it comes, append it (or an f-string with it) to a
    state to pass it on by reference. Where ``schema`` or ``tools`` make its value, iterating gives what
    there is of the value instead: plain JSON values, each further than the one before, the last complete. Of
    a reply iterating gives the prose, and ``partials`` the calls too.

    >>> s += af.user(f"Shorten this: {s['answer']}") + af.assistant(af.gen("short"))
    >>> async for delta in s["short"]:
    ...     print(delta, end="")
    Plants turn light into sugar.
    >>> s["short"].is_done, s["short"].has_value, s["short"].finish_reason
    (True, True, 'eos')
    >>> report = af.gen("report", schema=Report)
    >>> s += af.user("Write a report.") + af.assistant(report)
    >>> async for partial in s[report]:
    ...     latest = partial
    >>> latest
    {'summary': 'Clear and well argued.', 'score': 8}
    """

    def __init__(
        self, var_id: int, name: str, state: State, value_type: ValueType = TEXT, *, is_shown: bool = True
    ) -> None:
        self.source: Variable[Any] = self
        self.transforms = ()
        self.name = name
        self.is_shown = is_shown
        """Whether it is the program's own: streams tell of it."""
        self.line: ProgramLine | None = None
        """Where the program appended it. For errors."""
        self._id = var_id
        self._state = state
        self._type = value_type
        self._notation = ""
        self._reply = ReplySoFar() if value_type.is_reply else None
        self._value: Value | None = None
        self._error: ErrorInfo | None = None
        self._changed: anyio.Event | None = None
        # Held here, so that a marker in a string finds it again for as long as the variable lives.
        self._transformed: dict[tuple[Transform, ...], Transformed] = {}
        self._held: list[object] = []

    def __repr__(self) -> str:
        progress = (
            "failed" if self._error else "done" if self._value else f"{len(self._notation)} chars so far"
        )
        return f"<Variable {self.name!r} of {self._state.path}: {progress}>"

    @property
    def shown_name(self) -> str:
        return f"variable {self.name!r}"

    @property
    def marker_id(self) -> int:
        return self._id

    @property
    def id(self) -> int:
        """Its number in the session. For the session."""
        return self._id

    @property
    def state(self) -> State:
        """The state it belongs to.

        >>> branches[1]["judgment"].state.path
        (1,)
        """
        return self._state

    @property
    def value_type(self) -> ValueType:
        """What its value is, and how it is made of the text. For graphs."""
        return self._type

    @property
    def error(self) -> ErrorInfo | None:
        """What it failed with, if it did. For its run."""
        return self._error

    @property
    def text(self) -> str:
        """What there is of the text now; of a reply its prose, without the calls.

        >>> print(s["answer"].text)
        """
        return self._notation if self._reply is None else self._reply.follow(self._notation).text

    @property
    def tool_calls(self) -> tuple[CalledTool, ...]:
        """What there is now of a reply's tool calls; of anything else there are none.

        >>> s["answer"].tool_calls
        ()
        """
        return () if self._reply is None else self._reply.follow(self._notation).now().tool_calls

    @property
    def notation(self) -> str:
        """What there is of it now as it came: the text, and of a reply the notation of ``agentflow.reply``.
        For model calls."""
        return self._notation

    @property
    def is_done(self) -> bool:
        """Whether it is complete or has failed."""
        return self._value is not None or self._error is not None

    @property
    def has_value(self) -> bool:
        """Whether it is complete."""
        return self._value is not None

    @property
    def finish_reason(self) -> str:
        """``eos``, ``stop``, ``length`` or ``choice``; ``set``, ``read`` or ``provided`` of what no model
        wrote. Await the variable first."""
        return self._end().finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens it took: prompt, of which cached, and output. Await the variable first.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s["answer"].usage.output_tokens
        5
        """
        return self._end().usage

    @property
    def logprobs(self) -> tuple[float | None, ...] | None:
        """Each token's log-probability, where ``gen(..., logprobs=True)`` asked for it (None for a
        token that was encoded anew at the end of the text). Await the variable first.

        >>> s += af.gen("word", max_tokens=4, logprobs=True)
        >>> word = await s["word"]
        >>> len(s["word"].logprobs)
        4
        """
        return self._end().logprobs

    @property
    def top_logprobs(self) -> TopLogprobs | None:
        """The likeliest tokens at each token's place, likeliest first, where ``gen(..., top_logprobs=k)``
        asked for them (None for a token that was encoded anew). Await the variable first.

        >>> s += af.gen("word", max_tokens=4, top_logprobs=2)
        >>> word = await s["word"]
        >>> [len(place) for place in s["word"].top_logprobs]
        [2, 2, 2, 2]
        """
        return self._end().top_logprobs

    @property
    def choices(self) -> dict[str, float]:
        """Of a select: each choice's score, which is what its method compares (see ``select``): the largest
        is that of the choice that was taken, of equals the first. Await the variable first; ``BadArgument``
        for what comes from no select.

        >>> s += af.user("Is it about science?") + af.assistant(af.select("related", ["yes", "no"]))
        >>> await s["related"]
        'yes'
        >>> max(s["related"].choices, key=s["related"].choices.get)
        'yes'
        """
        found = self._end().choices
        if found is None:
            raise BadArgument(f"{self.name!r} comes from no select: only a select has choices")
        return dict(found)

    def __await__(self) -> Generator[object, None, ValueT_co]:
        return self._wait().__await__()

    async def _wait(self) -> ValueT_co:
        """The whole value; raises what failed."""
        stand_in = self._state.session.awaited(self)
        if stand_in is not None:
            return stand_in  # type: ignore[no-any-return]
        await self.settled()
        return self.value_now()

    def value_now(self) -> ValueT_co:
        """The whole value, once it is done; raises what failed. For its readers."""
        end = self._end()
        was_cut = end.finish_reason == "length"
        if was_cut and not self._type.may_be_cut:
            raise self._invalid(end)
        try:
            value: ValueT_co = self._type.read(self._notation)
        except (ValueError, RecursionError) as error:
            raise self._invalid(end) from error
        return value

    def _invalid(self, end: Value) -> InvalidValue:
        text, shown = self._notation, self._type.shown
        quoted = repr(text if len(text) <= 200 else f"{text[:199]}…")
        if end.finish_reason == "length":
            num = end.usage.output_tokens
            what = f"was cut after {num} token{'s' * (num != 1)} and is no complete {shown}, raise max_tokens"
        else:
            what = f"ended ({end.finish_reason}) with a text that is no {shown}"
        error = InvalidValue(f"{self.name!r} {what}: {quoted}")
        if self.line is not None:
            error.add_note(f"what failed was appended at {self.line}")
        return error

    async def whole_text(self) -> str:
        """The whole text, whatever its type (of a reply its prose); raises what failed.

        >>> s += af.user("Write a report.") + af.assistant(af.gen("report", schema=Report))
        >>> await s["report"].whole_text()
        '{"summary": "Clear and well argued.", "score": 8}'
        """
        await self.settled()
        self.raise_failure()
        return self.text

    async def settled(self) -> None:
        """Waits until it is complete or has failed; raises nothing.

        >>> await s["answer"].settled()
        """
        while not self.is_done:
            await self.change()

    @overload
    def __aiter__(self: Variable[str | float | list[str | Tagged] | Reply]) -> AsyncIterator[str]: ...
    @overload
    def __aiter__(self) -> AsyncIterator[Any]: ...
    def __aiter__(self) -> AsyncIterator[Any]:
        return PartialReader(self) if self._type.comes_in_parts else TextReader(self)

    @overload
    def partials(self: Variable[Reply]) -> AsyncIterator[Reply]: ...
    @overload
    def partials(self: Variable[str | float | list[str | Tagged]]) -> AsyncIterator[str]: ...
    @overload
    def partials(self) -> AsyncIterator[Any]: ...
    def partials(self) -> AsyncIterator[Any]:
        """What there is of the value, each time further than before, the last complete: a ``Reply`` of a
        reply, plain JSON values where ``schema`` or ``tools`` make it, the text of all else.

        >>> async with flow.state() as s:
        ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}]) + af.reply("said")
        ...     async for reply in s["said"].partials():
        ...         latest = reply
        >>> latest.text, latest.tool_calls
        ('Plants turn light into sugar.', ())
        """
        return PartialReader(self)

    def so_far(self, *, is_whole: bool = False) -> Any:
        """What there is of the value now, ``NothingYet`` where nothing can be shown. For its readers."""
        if self._type.comes_in_parts:
            return whole_value(self._notation) if is_whole else partial_value(self._notation)
        if self._reply is None:
            return self._notation
        if (reply := self._reply.follow(self._notation).now()) == Reply("") and not is_whole:
            raise NothingYet("nothing was said yet")
        return reply

    def hold(self, reference: object) -> None:
        """Keeps ``reference`` for as long as the variable lives. For traces."""
        self._held.append(reference)

    def transformed(self, transforms: tuple[Transform, ...]) -> Transformed:
        """Its text after these. For ``strip`` and its like."""
        found = self._transformed.get(transforms)
        if found is None:
            found = self._transformed[transforms] = Transformed(self, transforms)
        return found

    async def change(self) -> None:
        """Waits until there is news. For its readers."""
        self._state.session.check_alive()
        self._state.session.needs_values(f"the text of {self.name!r} is read")
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def extend(self, at: int, delta: str) -> None:
        """More text, from character ``at`` on. For the session."""
        before = self._notation if at == len(self._notation) else self._notation[:at]
        self._notation = before + delta
        self._wake()

    def complete(self, value: Value) -> None:
        """The end. For the session."""
        self._notation = self._notation[: value.at] + value.text
        self._value = value
        self._wake()

    def fail(self, error: ErrorInfo) -> None:
        """No value will come. For the session."""
        if not self.is_done:
            self._error = error
        self._wake()

    def raise_failure(self) -> None:
        """Raises why it has no value, if it failed. For its readers."""
        if self._error is not None:
            raise self._state.run.told(self._error)

    def _end(self) -> Value:
        self.raise_failure()
        if self._value is None:
            self._state.session.needs_values(f"how {self.name!r} ended is asked")
            raise BadArgument(f"{self.name!r} is not complete yet: await it first")
        return self._value
