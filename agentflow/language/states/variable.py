"""A variable: a value that is still being generated.

``Reference`` represents such a value and is passed on without waiting: it can be appended, formatted into an
f-string, transformed, and awaited. ``Variable`` is the value of one op, ``Transformed`` its text after some
transforms. All references to one op share one ``VariableNode``, and so do the ``readers`` that iterate over
it as it grows.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar, get_args, overload

from agentflow.errors import AgentflowError, BadArgument, RunFailed, StateClosed, shown_error
from agentflow.language.expressions import Appendable, Expression, Sequence_, make_tuple
from agentflow.language.failures.mistakes import defined_at
from agentflow.language.failures.stack_frames import calling_line, raised_at, without_internals
from agentflow.language.failures.user_code import UserCode
from agentflow.language.markers import MARKERS
from agentflow.language.media import check_is_text
from agentflow.language.states.readers import (
    ElementReader,
    PartialReader,
    ReasoningReader,
    TextReader,
    complete_value,
)
from agentflow.language.states.run import FIRST_MAPPED, StatePath, VariableNode
from agentflow.language.typed.replies import Reply
from agentflow.language.typed.tags import Tagged
from agentflow.language.typed.tools import ToolCall
from agentflow.language.typed.values import TEXT
from agentflow.protocol import ops
from agentflow.protocol.events import DecidedBy, ErrorInfo, PassedOver, TopLogprobs, Usage
from agentflow.protocol.text.text_parts import ListKind
from agentflow.protocol.text.transform import Transform, TransformName, apply_in_turn, check_transforms

ValueT_co = TypeVar("ValueT_co", covariant=True)
ElementT = TypeVar("ElementT")


class Reference(Expression, Generic[ValueT_co]):
    """Base of ``Variable`` and ``Transformed``: a value that may not exist yet. It cannot be compared,
    measured or taken apart; await it first."""

    is_text = True

    def __init__(self, node: VariableNode, transforms: tuple[Transform, ...]) -> None:
        self._node = node
        self._transforms = transforms
        self._number: int | None = None  # of its marker

    @property
    @abstractmethod
    def _label(self) -> str:
        """Its name in error messages."""

    @abstractmethod
    def __await__(self) -> Generator[object, None, ValueT_co]:
        """Returns the value, or raises the failure."""

    def strip(self) -> Transformed:
        """The text without white space at both ends.

        >>> await s.set("x", "  yes ").strip()
        'yes'
        """
        return self._then("strip")

    def lower(self) -> Transformed:
        """The text in lower case.

        >>> await s.set("x", "Yes").lower()
        'yes'
        """
        return self._then("lower")

    def upper(self) -> Transformed:
        """The text in upper case.

        >>> await s.set("x", "yes").upper()
        'YES'
        """
        return self._then("upper")

    def first_line(self) -> Transformed:
        """The first line that is not blank, stripped.

        >>> await s.set("x", "\\n Yes.\\nFor three reasons.").first_line()
        'Yes.'
        """
        return self._then("first_line")

    def json(self, path: str = "") -> Transformed:
        """The value at ``path`` (``"a.b.0"``; by default all of it) in a JSON text: a string unchanged, any
        other value as JSON. Fails with ``RunFailed`` if the text is not JSON or has no such value.

        >>> record = s.set("record", '{"name": "Ada", "born": {"year": 1815}}')
        >>> await record.json("born.year")
        '1815'
        """
        return self._then("json", path)

    def regex(self, pattern: str) -> Transformed:
        """The first match of ``pattern`` in the text; its first group if it has groups. Fails with
        ``RunFailed`` if nothing matches. Raises ``BadArgument`` immediately if the pattern is invalid.

        >>> await s.set("x", "I give it 8 of 10.").regex(r"(\\d+) of 10")
        '8'
        """
        return self._then("regex", pattern)

    def items(self, kind: ListKind = "numbered", index: int | None = None) -> Transformed:
        """The items of a list, one a line, or only the item at ``index``. Fails with ``RunFailed`` if there
        are none.

        Args:
            kind: ``numbered`` (``1. …``) or ``bulleted`` (``- …`` or ``* …``): other lines are dropped.
                ``comma``: values of a CSV text.
            index: The index of an item, from 0; negative from the end.

        >>> await s.set("x", "Sure:\\n1. light\\n2. water").items("numbered", 1)
        'water'
        """
        is_index = index is None or (isinstance(index, int) and abs(index) < 10**9)
        if not isinstance(kind, str) or not is_index:
            raise BadArgument(f"items: give a kind and an index, not {kind!r:.60} and {index!r:.60}")
        return self._then("items", kind if index is None else f"{kind}.{index:d}")

    def xml(self, tag: str) -> Transformed:
        """The text within the first ``<tag>…</tag>``, unchanged. Fails with ``RunFailed`` if there is none.

        >>> await s.set("x", "Let me see. <answer>8</answer>").xml("answer")
        '8'
        """
        return self._then("xml", tag)

    def yaml(self, path: str = "") -> Transformed:
        """Like ``json``, of a YAML text or the first Markdown block of it. Dates become texts in ISO's
        format. Fails with ``RunFailed`` for a text with aliases, or of more than 65,536 characters. Raises
        ``NotSupported`` if the package ``pyyaml`` is not installed.

        >>> await s.set("x", "name: Ada\\nborn: {year: 1815}").yaml("born.year")
        '1815'
        """
        return self._then("yaml", path)

    def number(self) -> Transformed:
        """The first decimal number, as JSON writes it. Fails with ``RunFailed`` if there is none.

        >>> await s.set("x", "About 1,250.50 tonnes.").number()
        '1250.50'
        """
        return self._then("number")

    def date(self, format: str = "") -> Transformed:
        """A date, or a date and time, in ISO's format. Fails with ``RunFailed`` if the text is no date.

        Args:
            format: As in ``datetime.strptime``, without ``%c``, ``%x``, ``%X`` and ``%Z``. Default: ISO's
                format.

        >>> await s.set("x", " 10 December 1815 ").date("%d %B %Y")
        '1815-12-10'
        """
        return self._then("date", format)

    def enum(self, values: Sequence[str]) -> Transformed:
        """The text, stripped, which must be one of ``values``. Fails with ``RunFailed`` if it is none.

        >>> await s.set("x", " yes\\n").enum(["yes", "no"])
        'yes'
        """
        if isinstance(values, str):
            raise BadArgument(f"enum: values must be a list of strings, not {values!r:.60}", param="values")
        words = make_tuple(values, "enum", "values", "strings")
        if not all(isinstance(word, str) for word in words):
            raise BadArgument(f"enum: values must be a list of strings, not {words!r:.60}", param="values")
        return self._then("enum", json.dumps(words, ensure_ascii=False))

    def map(self, function: Callable[[ValueT_co], str]) -> Variable[str]:
        """The result of ``function`` for the value; it must be a string. The function runs in this process
        and its result is sent to the backend. Other transforms run in the backend and save this round trip.

        >>> await s["answer"].map(lambda text: text.replace("sugar", "food"))
        'Plants turn light into food.'
        """
        state = self._node.state
        state.link.check_alive()
        state.link.check_runs()
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise BadArgument(
                f"map: give a function (not an async one) of the value, not {function!r}", param="function"
            )
        if not state.is_open:
            raise StateClosed(
                f"the state of {self._label} has ended: map it before its run ends", reason="ended"
            )
        state.link.needs_values(f"{self._label} is mapped by a Python function")
        variable = Variable[str](state.expect_text(f"{self._node.name}.map"))
        state.mapped_lines[variable.id] = calling_line()
        state.run.touch(variable._node)
        state.link.start_soon(_provide, variable._node, self, function)
        return variable

    def _then(self, name: TransformName, argument: str = "") -> Transformed:
        transforms = (*self._transforms, Transform(name, argument))
        check_transforms(transforms)
        MARKERS.reject([argument], f"{name}: its argument")
        found: Transformed | None = self._node.kept.get(transforms)
        if found is None:
            found = Transformed(self._node, transforms)
            self._node.kept[transforms] = found
        return found

    def check_sendable(self) -> None:
        """Raises an error if no text that is sent may refer to it. For the session."""

    def __format__(self, spec: str) -> str:
        if spec:
            raise BadArgument(
                f"{self._label} is passed on by reference and cannot be formatted with {spec!r}: "
                "use a plain {…}, or await it and format its value"
            )
        if self._number is None:
            self._number = MARKERS.next_number()
        return MARKERS.mark(self._number, self, self._node.name)

    def __str__(self) -> str:
        raise BadArgument(
            f"str() of {self._label}: await it for its value, or append it (or an f-string with it) "
            "to a state to pass it on unawaited"
        )

    def __bool__(self) -> NoReturn:
        self._refuse("tested for truth")

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
        self._refuse("indexed")

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            self._refuse("iterated with `for`, only with `async for`")

    if not TYPE_CHECKING:  # for which every attribute would exist

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(
                f"{self._label} is a reference, not a value, and has no attribute {name!r}: await it first"
            )

    def __add__(self, other: Appendable) -> Sequence_:
        if isinstance(other, int | float):
            self._refuse("used as a number")
        return super().__add__(other)

    def __sub__(self, other: object) -> NoReturn:
        self._refuse("used as a number")

    __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __sub__
    __pow__ = __rpow__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __and__ = __or__ = __sub__

    def __int__(self) -> NoReturn:
        self._refuse("used as a number")

    __float__ = __index__ = __neg__ = __abs__ = __int__

    def __round__(self, ndigits: int = 0) -> NoReturn:
        self._refuse("used as a number")

    def __lt__(self, other: object) -> NoReturn:
        self._refuse("compared")

    __le__ = __gt__ = __ge__ = __lt__

    def _refuse(self, what: str) -> NoReturn:
        name = self._node.name
        steps = self._label.removeprefix(f"variable {name!r}")
        source = (
            f"s[{name!r}]{steps}" if self._node.is_shown else f"s.{name}" if name == "text()" else "variable"
        )
        raise BadArgument(
            f"{self._label} is a reference, not a value, and cannot be {what}: await it first, as in "
            f"`value = await {source}`"
        )


class ReferencedVariable(NamedTuple):
    """The variable behind a reference. ``transforms`` apply to its text; ``label`` is for messages."""

    node: VariableNode
    transforms: tuple[Transform, ...]
    label: str


def find_target(reference: Reference[Any]) -> ReferencedVariable:
    """The variable behind a reference, as its run has it."""
    return ReferencedVariable(reference._node, reference._transforms, reference._label)


async def complete_text(reference: Reference[Any]) -> str:
    """The complete text of a reference; raises its failure."""
    return await apply_in_turn(await reference._node.whole_text(), reference._transforms)


async def complete_marked_text(item: Expression) -> str:
    """The text of a sum, or of the object behind a marker, in a program's result. ``BadArgument`` if it has
    none."""
    if isinstance(item, Sequence_) and item.has_text():
        text = ""
        for part in item.parts:
            if isinstance(part, str):
                text += await MARKERS.resolved(part, complete_marked_text)
            else:
                text += await complete_marked_text(part)
        return text
    if not isinstance(item, Reference):
        raise BadArgument("the program returns a text with an expression that was never appended to a state")
    return await complete_text(item)


class Transformed(Reference[str]):
    """A variable's text after some transforms. Made by ``s["x"].strip()`` and the like.

    >>> s += af.user("Answer in capitals: ", s["answer"].first_line().upper())
    >>> print(await s["answer"].first_line().upper())
    PLANTS TURN LIGHT INTO SUGAR.
    """

    def __repr__(self) -> str:
        return f"<Variable{MARKERS.repr_tag} {self._label.removeprefix('variable ')}>"

    @property
    def _label(self) -> str:
        steps = [f".{t.name}({t.argument!r})" if t.argument else f".{t.name}()" for t in self._transforms]
        return f"variable {self._node.name!r}{''.join(steps)}"

    def __await__(self) -> Generator[object, None, str]:
        return complete_text(self).__await__()


class Variable(Reference[ValueT_co]):
    """The value of one ``gen``, ``select`` or ``set``. States make variables; ``s["x"]`` finds them.

    Await a variable for its value. Iterate over it for its text as it grows. Append it, or an f-string with
    it, to a state to pass it on by reference. If its value comes from ``schema`` or ``tools``, iterating
    gives the part of the value so far instead: plain JSON values, each longer than the one before, the last
    complete. Iterating over a reply gives its prose; ``partials`` gives its tool calls too.

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

    def __init__(self, node: VariableNode) -> None:
        super().__init__(node, ())
        node.front = self

    def __repr__(self) -> str:
        node = self._node
        progress = "failed" if node.error else "done" if node.has_value else f"{len(node.grown)} chars so far"
        return f"<Variable{MARKERS.repr_tag} {node.name!r} of {node.state.path}: {progress}>"

    @property
    def _label(self) -> str:
        return f"variable {self._node.name!r}"

    @property
    def name(self) -> str:
        """The name of the variable in its state.

        >>> s["answer"].name
        'answer'
        """
        return self._node.name

    @property
    def id(self) -> int:
        """The number of the variable in its session, as in recordings.

        >>> s["answer"].id > s.id
        True
        """
        return self._node.id

    @property
    def path(self) -> StatePath:
        """The path of the variable's state in the fork tree.

        >>> branches[1]["judgment"].path
        (1,)
        """
        return self._node.state.path

    @property
    def text(self) -> str:
        """The text so far; of a reply the prose, without the tool calls.

        >>> print(s["answer"].text)
        """
        return self._node.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of a reply so far; empty for any other variable.

        >>> s["answer"].tool_calls
        ()
        """
        return self._node.tool_calls

    @property
    def is_done(self) -> bool:
        """Whether it is complete or has failed."""
        return self._node.is_done

    @property
    def has_value(self) -> bool:
        """Whether it is complete."""
        return self._node.has_value

    @property
    def finish_reason(self) -> str:
        """``eos``, ``stop``, ``length`` or ``choice``; ``set``, ``read`` or ``provided`` for a text that no
        model wrote. Await the variable first."""
        return self._node.end.finish_reason

    @property
    def usage(self) -> Usage:
        """The tokens of the generation: prompt, cached part of the prompt, and output. Await the variable
        first.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s["answer"].usage.output_tokens
        5
        """
        return self._node.end.usage

    @property
    def model(self) -> str:
        """The model that wrote the value; with ``af.Fallback``, the candidate that answered. Await the
        variable first.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s["answer"].model == flow.capabilities.model
        True
        """
        _ = self._node.end  # raises its failure
        return self._node.model

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """With ``af.Fallback``, the candidates that failed before, each with its ``error``. Await the
        variable first.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s["answer"].passed_over
        ()
        """
        return self._node.end.passed_over

    @property
    def forced(self) -> tuple[tuple[int, int], ...]:
        """The parts of the text that a constraint forced, so that the model did not sample them: pairs of the
        first character and the number of characters, in order. Await the variable first.

        >>> s += af.user("Why?") + af.gen("word", max_tokens=3)
        >>> word = await s["word"]
        >>> [word[first : first + count] for first, count in s["word"].forced]  # no constraint
        []
        """
        return self._node.end.forced or ()

    @property
    def reasoning(self) -> str | None:
        """The reasoning that a model generated before the text; None if there is none. It is not part of the
        value. The model's chat template decides whether later turns contain it. Await the variable first.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s["answer"].reasoning is None  # no reasoning model
        True
        """
        return self._node.end.reasoning

    def reasoning_deltas(self) -> AsyncIterator[str]:
        """Yields the reasoning that precedes the text. With ``stream_reasoning=True`` it comes in parts while
        it is generated, otherwise in one piece when the variable is done. Failures are raised to the readers
        of the text, not here.

        >>> s += af.user("Why?") + af.assistant(af.gen("why", stream_reasoning=True))
        >>> async for delta in s["why"].reasoning_deltas():
        ...     print(delta, end="")
        >>> await s["why"]
        'Plants turn light into sugar.'
        """
        return ReasoningReader(self._node)

    @property
    def logprobs(self) -> tuple[float | None, ...] | None:
        """The log-probability of each token, with ``gen(..., logprobs=True)``; None for a token at the end of
        the text that was encoded again. Await the variable first.

        >>> s += af.user("Why?") + af.gen("word", max_tokens=3, logprobs=True)
        >>> word = await s["word"]
        >>> len(s["word"].logprobs)
        3
        """
        return self._node.end.logprobs

    @property
    def top_logprobs(self) -> TopLogprobs | None:
        """The most likely tokens at each position, most likely first, with ``gen(..., top_logprobs=k)``; None
        for a token that was encoded again. Await the variable first.

        >>> s += af.user("Why?") + af.gen("word", max_tokens=3, top_logprobs=2)
        >>> word = await s["word"]
        >>> [len(place) for place in s["word"].top_logprobs]
        [2, 2, 2]
        """
        return self._node.end.top_logprobs

    @property
    def choices(self) -> dict[str, float]:
        """The score of each choice of a ``select``, under its method. The selected choice has the highest
        score; of equal scores, it is the first choice. Await the variable first. ``BadArgument`` if it is not
        the value of a select.

        >>> s += af.user("Is it about science?") + af.assistant(af.select("related", ["yes", "no"]))
        >>> await s["related"]
        'yes'
        >>> max(s["related"].choices, key=s["related"].choices.get)
        'yes'
        """
        found = self._node.end.choices
        if found is None:
            raise BadArgument(f"{self.name!r} is not the value of a select: only a select has choices")
        return dict(found)

    @property
    def decided_by(self) -> DecidedBy | None:
        """How the value of a select or a decide was found: ``logprobs``, by the log-probabilities of all
        choices; ``endpoint``, by the provider's endpoint for decisions; ``text``, by the text that the model
        wrote under a constraint, without scores of the other choices. None for other variables.

        >>> answers = await s.decide({"related": bool})
        >>> s["decisions"].decided_by
        'logprobs'
        """
        return self._node.end.decided_by

    def __await__(self) -> Generator[object, None, ValueT_co]:
        return self._wait().__await__()

    async def _wait(self) -> ValueT_co:
        node, link = self._node, self._node.state.link
        if link.is_tracing:
            return link.stand_in(node)  # type: ignore[no-any-return]
        if node.value_type is TEXT:
            return await node.whole_text()  # type: ignore[return-value]
        await node.awaited()
        value: ValueT_co = complete_value(node)
        return value

    async def get(
        self,
        *,
        objective: ops.Objective | None = None,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
    ) -> ValueT_co:
        """The value, as ``await`` returns it, with advice to the scheduler about the request that generates
        it, and so about the requests before it. Changes no result.

        Args:
            objective: ``"latency"`` or ``"throughput"``, as in ``s.hint``.
            ttft_s: The wanted time until the first token, in seconds. When the request must start to meet it,
                it goes before the tenant's other requests of its priority.
            tpot_s: The wanted time of each further token, in seconds.

        >>> await s["answer"].get(objective="throughput")
        'Plants turn light into sugar.'
        """
        if objective not in (None, *get_args(ops.Objective)):
            raise BadArgument(
                f"get: objective must be latency or throughput, not {objective!r}", param="objective"
            )
        ops.check_want(ttft_s, tpot_s)
        node, link = self._node, self._node.state.link
        if not node.is_done and not link.is_tracing:
            link.send([ops.Want(node.id, "value", objective, ttft_s, tpot_s)])
        return await self

    async def whole_text(self) -> str:
        """Waits for the complete text, whatever the type of the value; of a reply, the prose. Raises its
        failure.

        >>> s += af.user("Write a report.") + af.assistant(af.gen("report", schema=Report))
        >>> await s["report"].whole_text()
        '{"summary": "Clear and well argued.", "score": 8}'
        """
        return await self._node.whole_text()

    async def settled(self) -> None:
        """Waits until it is complete or has failed; raises nothing.

        >>> await s["answer"].settled()
        """
        await self._node.settled()

    @overload
    def __aiter__(self: Variable[str | float | list[str | Tagged] | Reply]) -> AsyncIterator[str]: ...
    @overload
    def __aiter__(self) -> AsyncIterator[Any]: ...
    def __aiter__(self) -> AsyncIterator[Any]:
        return PartialReader(self._node) if self._node.value_type.comes_in_parts else TextReader(self._node)

    @overload
    def partials(self: Variable[Reply]) -> AsyncIterator[Reply]: ...
    @overload
    def partials(self: Variable[str | float | list[str | Tagged]]) -> AsyncIterator[str]: ...
    @overload
    def partials(self) -> AsyncIterator[Any]: ...
    def partials(self) -> AsyncIterator[Any]:
        """The value so far, each time longer than before, the last complete: a ``Reply`` for a reply, plain
        JSON values if ``schema`` or ``tools`` make it, otherwise the text.

        >>> async with flow.state() as s:
        ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}]) + af.reply("said")
        ...     async for reply in s["said"].partials():
        ...         latest = reply
        >>> latest.text, latest.tool_calls
        ('Plants turn light into sugar.', ())
        """
        return PartialReader(self._node)

    def elements(self: Variable[Iterable[ElementT]]) -> AsyncIterator[ElementT]:
        """Iterates over a list under a ``schema`` while it is generated. Each element has its type, and comes
        when the text after it has begun.

        Raises:
            BadArgument: The schema is no list.
            InvalidValue: While iterating: the text is truncated, or an element or the list is not valid.

        >>> s += af.user("Name two.") + af.assistant(af.gen("things", schema=list[str]))
        >>> async for thing in s["things"].elements():
        ...     print(thing)
        light
        water
        """
        kind = self._node.value_type
        read = kind.element_reader()
        if read is None:
            raise BadArgument(
                f"elements: {self._label} has the type {kind.shown}: give a schema such as list[str]"
            )
        return ElementReader(self._node, read)


async def _provide(variable: VariableNode, reference: Reference[Any], function: Callable[[Any], str]) -> None:
    """Sends an expected variable its value, or the error that prevented it."""
    source, link = reference._node, variable.state.link
    await source.settled()
    if source.error is not None:  # not awaited below: that would count as raised in the program
        link.send([ops.Provide(variable.id, error=source.error)], quiet=True)
        return
    try:
        given = await reference
        with UserCode("map: the function"):
            value = function(given)
        check_is_text("map", [value])
        if not isinstance(value, str):
            raise BadArgument(
                f"map: the function must return a string, not {value!r}: {defined_at(function)}"
            )
        MARKERS.reject([value], "map: what the function returns", "function")
        link.send([ops.Provide(variable.id, value)], quiet=True)
    except Exception as error:
        failure: Exception = error
        if not isinstance(error, AgentflowError):
            failure = RunFailed(f"map failed: {shown_error(error)}, raised at {raised_at(error)}")
            variable.state.mapped_errors[variable.id] = without_internals(error)
        # With a separate place, so that two failures with equal messages count as two.
        info = ErrorInfo.of(failure).at(variable.state.id, FIRST_MAPPED + variable.id)
        link.send([ops.Provide(variable.id, error=info)], quiet=True)
