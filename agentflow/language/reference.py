"""What stands for a value that is still being made, wherever it may be used: a variable, or what
transforms make of one.

It can be awaited, appended, put into an f-string, added to text, and transformed; it is passed on by
reference. It is not the value: to compare or to measure it, await it first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from agentflow.errors import BadArgument
from agentflow.language.expressions import Expression
from agentflow.protocol.transform import Transform, TransformName, apply_in_turn, check_transforms

if TYPE_CHECKING:
    from agentflow.language.variable import Variable

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
