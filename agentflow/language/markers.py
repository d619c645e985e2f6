"""Markers: text that represents a variable or an expression in a string into which it was formatted.

``f"{s['x']}"`` holds a marker, and so does ``f"{af.gen('x')}"``. Appending the string to a state finds the
variable or the expression again. A marker holds a 128-bit nonce of the process, so no text from elsewhere
contains one, and the server never looks for markers. The reprs of variables, expressions and states hold
another nonce, so that a text with one is found too: ``f"{[s['x']]}"`` holds a repr and no marker.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Final

from agentflow.errors import BadArgument, StateClosed
from agentflow.language.records import copy_with, is_record, members, set_members

_OPEN, _CLOSE = "\u27e6af:", "\u27e7"
_ESCAPED_OPEN, _ESCAPED_CLOSE = "\\u27e6af:", "\\u27e7"  # as json.dumps writes them
_BRACKET = _OPEN[0]
_NUM_DIGITS: Final = 32
_READABLE: Final = ", not awaited"
_MOST_NAMED: Final = 40
MOST_KEPT: Final = 10_000
"""Markers of expressions. Nothing else refers to an expression in an f-string."""


class Sum:
    """Base of sums of texts, variables and expressions (``expressions.Sequence_``). No ``ABC``, because its
    ``isinstance`` would run code of the values in which sums are searched for."""

    __slots__ = ()

    def has_text(self) -> bool:
        """Whether it has only texts and variables: in the result of a program, it is a text."""
        raise NotImplementedError


class Markers:
    """Makes and finds markers."""

    def __init__(self) -> None:
        # Half of the nonce is at either end, so that both parts of a marker that is cut have digits.
        nonce = secrets.token_hex(_NUM_DIGITS // 2)
        self._first, self._last = nonce[: _NUM_DIGITS // 2], nonce[_NUM_DIGITS // 2 :]
        self.repr_tag = f"#{secrets.token_hex(4)}"
        inner = f"{self._first}:[A-Za-z0-9_]*{_READABLE}:{self._last}:([0-9]+)"
        self._whole = re.compile(f"{_OPEN}{inner}{_CLOSE}")
        self._escaped = re.compile(re.escape(_ESCAPED_OPEN) + inner + re.escape(_ESCAPED_CLOSE))
        # Any of these in a text shows a damaged marker or a repr. Any 15 consecutive digits of a half contain
        # one of its quarters; a piece that ends closer to either end still has a bracket and some digits.
        quarters = [nonce[start : start + 8] for start in range(0, _NUM_DIGITS, 8)]
        self._remains = (*quarters, _OPEN + nonce[:4], self.repr_tag)
        # A piece with fewer digits, which are not part of a longer number.
        starts = "|".join([nonce[:count] for count in (3, 2, 1)])
        self._head = re.compile(f"{_OPEN}(?:{starts})(?![0-9a-f])", re.IGNORECASE)
        ends = "|".join([nonce[-count:] for count in (3, 2, 1)])
        self._tail = re.compile(f"(?:{nonce[-4:]}|(?<![0-9a-f])(?:{ends})):[0-9]+{_CLOSE}", re.IGNORECASE)
        self._num_marked = 0
        # Weak: a marker in a string must not keep a variable of a run that has ended.
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._expressions: OrderedDict[int, Any] = OrderedDict()

    def next_number(self) -> int:
        """A number for ``mark``."""
        self._num_marked += 1
        return self._num_marked

    def mark(self, number: int, variable: object, name: str) -> str:
        """The marker of a variable, which its run keeps. ``number``: from ``next_number``. ``name``: for
        people who print the marker."""
        self._variables[number] = variable
        return self._marker(number, name)

    def mark_expression(self, expression: object) -> str:
        """The marker of an expression. The last ``MOST_KEPT`` are kept."""
        number = self.next_number()
        self._expressions[number] = expression
        if len(self._expressions) > MOST_KEPT:
            self._expressions.popitem(last=False)
        return self._marker(number, type(expression).__name__)

    def _marker(self, number: int, name: str) -> str:
        shown = re.sub("[^A-Za-z0-9_]", "_", name[:_MOST_NAMED])
        return f"{_OPEN}{self._first}:{shown}{_READABLE}:{self._last}:{number}{_CLOSE}"

    def split(self, text: str) -> list[Any]:
        """``text`` with its markers replaced by their variables and expressions. ``BadArgument`` for a
        damaged marker or a repr, ``StateClosed`` for a marker whose variable is gone."""
        if not self._has_remains(text):
            return [text] if text else []
        parts: list[Any] = []
        pieces = self._whole.split(text)
        for index, piece in enumerate(pieces):
            if index % 2:
                parts.append(self._marked(int(piece)))
            elif self._has_remains(piece, is_last=index == len(pieces) - 1):
                raise BadArgument(
                    "this text has the repr of a variable, an expression or a state, or a damaged marker of "
                    "one (truncated, padded or changed): append the variable itself, format it alone with a "
                    "plain {…} (not in a list, and without !r), or await it and use its value"
                )
            elif piece:
                parts.append(piece)
        return parts

    def is_in(self, text: str) -> bool:
        """Whether the text holds a marker, a damaged one, or a repr."""
        return self._num_marked > 0 and self._has_remains(text)

    def reject(self, texts: Iterable[object], where: str, param: str | None = None) -> None:
        """``BadArgument`` if one of these texts, which are sent unchanged, holds a marker. ``param``: the
        argument that they come from."""
        if any(isinstance(text, str) and self._has_remains(text) for text in texts):
            raise BadArgument(
                f"{where} cannot hold a variable that is passed on by reference: await it and use its value",
                param=param,
            )

    async def resolved(self, value: Any, text_of: Callable[[Any], Awaitable[str]]) -> Any:
        """``value`` with texts in place of sums, and of markers in strings, also inside JSON: in lists,
        tuples, sets, dicts and records. Other objects are unchanged, and so is ``value`` if it holds no
        marker and no sum. Errors as in ``split``."""
        if not self._holds_one(value):
            return value
        texts, holders = self._found(value)
        made = {text: await self._resolved_text(text, text_of) for text in texts}
        return _copied(value, made, holders, {})

    def _holds_one(self, value: Any) -> bool:
        pending, seen = [value], dict[int, Any]()
        while pending:
            one = pending.pop()
            if isinstance(one, str | Sum):
                if self._is_unresolved(one):
                    return True
            elif type(one) not in _PLAIN and id(one) not in seen:
                seen[id(one)] = one
                pending += _items(one)
        return False

    def _is_unresolved(self, text: str | Sum) -> bool:
        if isinstance(text, Sum):
            return text.has_text()
        return self._num_marked > 0 and self._has_remains(text)

    def _found(self, value: Any) -> tuple[Collection[str | Sum], Collection[int]]:
        """The texts that hold a marker, the sums, and the ids of the objects that hold one of these, directly
        or not."""
        texts, holders = dict[str | Sum, None](), set[int]()
        pending: list[tuple[Collection[Any], int]] = [((value,), 0)]
        seen = dict[int, Any]()
        parents, reached = dict[int, list[int]](), list[int]()
        while pending:
            items, parent = pending.pop()
            for one in items:
                if isinstance(one, str | Sum):
                    if self._is_unresolved(one):
                        texts[one] = None
                        reached.append(parent)
                elif inner := _items(one):
                    parents.setdefault(id(one), []).append(parent)
                    if id(one) not in seen:
                        seen[id(one)] = one
                        pending.append((inner, id(one)))
        while reached:
            if (holder := reached.pop()) not in holders:
                holders.add(holder)
                reached += parents.get(holder, ())
        return texts, holders

    async def _resolved_text(self, text: str | Sum, text_of: Callable[[Any], Awaitable[str]]) -> str:
        if isinstance(text, Sum):
            return await text_of(text)
        plain = []
        for part in self.split(await self._unescaped(text, text_of)):
            plain.append(part if isinstance(part, str) else await text_of(part))
        return "".join(plain)

    async def _unescaped(self, text: str, text_of: Callable[[Any], Awaitable[str]]) -> str:
        """The text with the variables of markers inside JSON."""
        pieces = self._escaped.split(text)
        for index in range(1, len(pieces), 2):
            found = await text_of(self._marked(int(pieces[index])))
            pieces[index] = json.dumps(found)[1:-1]
        return "".join(pieces)

    def _has_remains(self, text: str, *, is_last: bool = True) -> bool:
        lowered = text.lower()
        return (
            any(part in lowered for part in self._remains)
            or (_BRACKET in text and self._head.search(text) is not None)
            or (is_last and lowered.endswith((_OPEN, _OPEN[:-1])))
            or (_CLOSE in text and self._tail.search(text) is not None)
        )

    def _marked(self, number: int) -> Any:
        found = self._variables.get(number)
        if found is None:  # a variable has no truth value
            found = self._expressions.get(number)
        if found is None:
            raise StateClosed(
                "a variable in this text has ended with its run: await it before that", reason="ended"
            )
        return found


_PLAIN: Final = frozenset([int, float, bool, bytes, type(None)])
_COLLECTIONS: Final[tuple[Any, ...]] = (list, tuple, set, frozenset)


def _items(value: Any) -> Collection[Any]:
    """The items of a collection, the members of a record, or nothing, without running code of a subclass."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    for kind in _COLLECTIONS:
        if isinstance(value, kind):
            return value if type(value) is kind else [*kind.__iter__(value)]
    return members(value).values() if is_record(value) else ()


def _copied(
    value: Any, texts: Mapping[str | Sum, str], holders: Collection[int], made: dict[int, Any]
) -> Any:
    """A copy of ``value`` in which ``texts`` replace the sums and the texts that hold a marker. Only
    ``holders`` are copied, each once, because a member may refer to its owner. ``made``: the copies by the id
    of their original."""
    if isinstance(value, str | Sum):
        return texts.get(value, value)
    if id(value) not in holders:
        return value
    if id(value) in made:
        return made[id(value)]

    found: Any
    # Loops, not comprehensions or helpers, whose frames would halve the possible depth.
    if isinstance(value, dict):
        found = made[id(value)] = copy.copy(value)  # also of a subclass, such as a defaultdict
        found.clear()
        for key, item in value.items():
            found[_copied(key, texts, holders, made)] = _copied(item, texts, holders, made)
    elif type(value) is list:
        found = made[id(value)] = []
        for item in value:
            found.append(_copied(item, texts, holders, made))
    elif type(value) in (tuple, set, frozenset) or (isinstance(value, tuple) and hasattr(value, "_make")):
        items = []
        for item in value:
            items.append(_copied(item, texts, holders, made))
        make = getattr(value, "_make", type(value))
        found = made.setdefault(id(value), make(items))
    elif is_record(value):
        found = made[id(value)] = copy_with(value, {})
        for name, member in members(value).items():
            item = _copied(member, texts, holders, made)
            if item is not member:
                set_members(found, {name: item})
    else:
        found = value
    return found


MARKERS: Final = Markers()
"""The markers of this process."""
