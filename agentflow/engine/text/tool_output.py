"""Reads an assistant's text as it comes, and tells prose from tool calls.

A call is told in one of two ways. Where a constraint keeps calls valid, its name is told as soon as it is
there, and its arguments as they grow. Otherwise a call is told when it is whole, as only then one knows
that it is a call: what turns out to be none is prose, and none of it is lost.

The text of tool calls in a model's notation, read whole or up to the arguments.

Where a JSON object or list ends, in a text that comes bit by bit. What is in it is not checked.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection

import jiter
import msgspec
import regex

from agentflow.engine.text.tool_format import ToolFormat
from agentflow.protocol.chat import Arguments, CallBegun, Piece, TextPiece


def read_calls(form: ToolFormat, names: Collection[str], text: str) -> list[tuple[str, str]]:
    """Names and arguments of a call, or of a list of calls, that is the whole ``text``; none where one of
    them is no call of a tool of these ``names``."""
    if not could_be_json(text):  # the same reader's word, whether it comes early or late
        return []
    calls: list[tuple[str, str]] = []
    try:
        if text.startswith("["):
            objects = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
        else:
            objects = [msgspec.json.decode(text, type=dict[str, msgspec.Raw])]
        for members in objects:
            name = msgspec.json.decode(members[form.name_key], type=str)
            arguments = bytes(members[form.arguments_key]).decode()
            msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
            if name not in names:
                return []
            calls.append((name, arguments))
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError):
        return []
    return calls


def could_be_json(text: str) -> bool:
    """Whether the text can go on to be JSON."""
    try:
        jiter.from_json(text.encode(), partial_mode="trailing-strings")
        return True
    except ValueError:
        return False


def name_of(found: regex.Match[str]) -> str | None:
    """The name in a whole match of ``CallHeads.first`` or ``later``; None where it is no JSON string."""
    try:
        return msgspec.json.decode(found["name"], type=str)
    except msgspec.MsgspecError:
        return None


class CallHeads:
    """What stands around arguments in a format whose calls are told as they grow. ``first``: from the mark to
    the first arguments; ``after``: from arguments to the end of the call, or of the list, or to where the
    list has ``more``; ``later``: from there to the arguments of the next call."""

    def __init__(self, form: ToolFormat) -> None:
        constants = "".join([rf"{_json(key)}\s*:\s*{_json(value)}\s*,\s*" for key, value in form.constants])
        name = rf'{_json(form.name_key)}\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
        call = rf"\{{\s*{constants}{name}{_json(form.arguments_key)}\s*:\s*(?=\{{)"
        opening = r"\[\s*" if form.is_list else ""
        self.first = regex.compile(rf"{regex.escape(form.mark)}\s*{opening}{call}")
        self.later = regex.compile(rf"\[\s*{call}")
        end = r"\s*(?:(?P<more>,)|\])" if form.is_list else ""
        self.after = regex.compile(rf"\s*\}}{end}")


def _json(text: str) -> str:
    return regex.escape(json.dumps(text, ensure_ascii=False))


_NEXT = re.compile(r'[][{}"]')
_IN_STRING = re.compile(r'["\\]')


class JsonExtent:
    """Reads an object or a list from its first character on. Each character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._after_backslash = False

    def read(self, text: str) -> int | None:
        """Goes on by ``text``; how much of it belongs to the value, or None where all does and the value
        is not over. Not called after that."""
        at = 0
        while at < len(text):
            if self._after_backslash:
                self._after_backslash = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _NEXT).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "\\":
                self._after_backslash = True
            else:
                self._depth += 1 if found[0] in "[{" else -1
                if self._depth == 0:
                    return at
        return None


class ToolOutput:
    """One answer's text. ``names``: of the tools that may be called; none where nothing is read as a call.
    ``is_constrained``: a constraint keeps calls valid. ``begins``: with them, an answer that begins with
    none of them has no calls. ``num_calls``: so many were told so far.

    >>> output = ToolOutput(tool_format(template), ["weather"], is_constrained=True)
    >>> pieces = output.push('I look.\\n<tool_call>\\n{"name": "weather", "arguments": {"ci')
    [TextPiece('I look.'), CallBegun('call_…', 'weather'), Arguments('{"ci')]
    >>> pieces += output.push('ty": "Oslo"}}\\n</tool_call>') + output.finish()

    What is told does not depend on how the text was cut, but for where pieces of one kind are cut. Of prose
    only that is held back which could belong to the mark of a call, or stand between two.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], *, is_constrained: bool, begins: Collection[str] = ()
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._begins = tuple(begins)
        self.num_calls = 0
        self._held = ""
        self._pieces: list[Piece] = []
        self._space = ""
        self._extent = JsonExtent()
        self._num_read = 0  # characters of what is held that the extent has seen
        self._checked_at = 0  # so many characters could be JSON
        self._read: Callable[[bool], bool] = self._read_start if names else self._read_prose
        self._marks = _openings(form) if names else ()
        self._heads = CallHeads(form) if is_constrained and form.name_first else None

    def push(self, text: str) -> list[Piece]:
        """The text goes on; what that makes certain."""
        self._held += text
        return self._go_on(is_over=False)

    def finish(self, rest: str = "") -> list[Piece]:
        """The text goes on by ``rest`` and is over; what was held back."""
        self._held += rest
        return self._go_on(is_over=True)

    def _go_on(self, *, is_over: bool) -> list[Piece]:
        # Each reader takes from the front of what is held, says who reads on, and whether anybody can.
        while self._read(is_over):
            continue
        told, self._pieces = self._pieces, []
        return told

    # Outside of calls

    def _read_start(self, is_over: bool) -> bool:
        """Where calls have no mark, or come first, the text is one from its beginning or has none."""
        if self._begins and not self._held.startswith(self._begins):
            if not is_over and any(begin.startswith(self._held) for begin in self._begins):
                return False
            self._marks = ()
            self._read = self._read_prose
            return True
        if self._form.mark:
            self._read = self._read_prose
            return True
        bare = self._held.lstrip()
        if not bare:
            return self._all_is_prose() if is_over else False
        opening = "[" if self._form.is_list else "{"
        self._read = self._read_prose
        if bare.startswith(opening):
            self._tell_prose(len(self._held) - len(bare))
            self._begin_call()
        return True

    def _read_prose(self, is_over: bool) -> bool:
        mark = self._form.mark if self._marks else ""
        at = self._held.find(mark) if mark else -1
        if at >= 0:
            before = self._form.before
            kept = at - len(before) if self._held.endswith(before, 0, at) else at
            self._tell_prose(kept)
            self._begin_call(at - kept)
            return True
        unsure = 0 if is_over else max((_overlap(self._held, m) for m in self._marks), default=0)
        self._tell_prose(len(self._held) - unsure)
        return False

    def _read_gap(self, is_over: bool) -> bool:
        """Behind a call: its end, and white space up to another one or to the end of the text is nobody's."""
        bare = self._held.lstrip()
        if not bare:
            if is_over:
                self._held = ""
            return False
        mark = self._form.mark
        if mark and mark.startswith(bare) and bare != mark:
            if is_over:
                self._held = ""  # cut off within the mark of another call
            return False
        if mark and bare.startswith(mark):
            self._begin_call(len(self._held) - len(bare))
        else:
            self._read = self._read_prose
        return True

    def _read_end(self, is_over: bool) -> bool:
        end = self._form.end.strip()
        bare = self._held.lstrip()
        if not is_over and end.startswith(bare) and bare != end:
            return False
        if end and bare.startswith(end):
            self._held = bare[len(end) :]
        elif is_over and end.startswith(bare):
            self._held = ""  # cut off within its end
        self._read = self._read_gap
        return True

    def _all_is_prose(self) -> bool:
        self._tell_prose(len(self._held))
        return False

    def _tell_prose(self, length: int) -> None:
        if length:
            self._pieces.append(TextPiece(self._held[:length]))
            self._held = self._held[length:]

    # Calls

    def _begin_call(self, num_before: int = 0) -> None:
        """What is held begins with so much white space, which goes with the call, and the mark."""
        self._space, self._held = self._held[:num_before], self._held[num_before:]
        self._extent, self._num_read, self._checked_at = JsonExtent(), 0, 0
        self._read = self._read_whole if self._heads is None else self._read_head

    def _no_call(self) -> bool:
        """What is held only looked like one: its mark is prose, and what comes after it is looked at anew."""
        self._read = self._read_prose
        self._held = self._space + self._held
        if self._form.mark:
            self._tell_prose(len(self._space) + len(self._form.mark))
        else:
            self._marks = ()
        return True

    def _read_head(self, is_over: bool) -> bool:
        """Up to the arguments."""
        assert self._heads is not None
        found = self._heads.first.match(self._held, partial=True)
        return self._take_head(found, is_over)

    def _read_next_head(self, is_over: bool) -> bool:
        """Up to the arguments of the list's next call, or to its end."""
        assert self._heads is not None
        found = self._heads.after.match(self._held, partial=True)
        if found is None or (is_over and found.partial):
            self._read = self._read_end
            return True
        if found.partial:
            return False
        self._held = self._held[found.end() :]
        if self._form.is_list and found["more"]:
            self._held = "[" + self._held
            self._read = self._read_later_head
        else:
            self._read = self._read_end
        return True

    def _read_later_head(self, is_over: bool) -> bool:
        assert self._heads is not None
        found = self._heads.later.match(self._held, partial=True)
        return self._take_head(found, is_over)

    def _take_head(self, found: regex.Match[str] | None, is_over: bool) -> bool:
        if found is not None and found.partial and not is_over:
            return False
        name = None if found is None or found.partial else name_of(found)
        if found is None or name not in self._names or name is None:
            self._extent, self._num_read = JsonExtent(), 0
            self._read = self._read_whole
            return True
        self._tell_call(name)
        self._held = self._held[found.end() :]
        self._extent = JsonExtent()
        self._read = self._read_arguments
        return True

    def _read_arguments(self, is_over: bool) -> bool:
        if not self._held:
            return False
        end = self._extent.read(self._held)
        length = len(self._held) if end is None else end
        self._pieces.append(Arguments(self._held[:length]))
        self._held = self._held[length:]
        if end is None:
            return False
        self._read = self._read_next_head
        return True

    def _read_whole(self, is_over: bool) -> bool:
        """All of a call, or of a list of calls, before any of it is told."""
        mark = len(self._form.mark)
        bare = self._held[mark:].lstrip()
        if not bare:
            return self._no_call() if is_over else False
        if bare[0] not in "{[":
            return self._no_call()
        start = len(self._held) - len(bare)
        at = max(start, self._num_read)
        end = self._extent.read(self._held[at:])
        self._num_read = len(self._held)
        if end is None:
            return self._no_call() if is_over or self._is_no_json(bare) else False
        calls = read_calls(self._form, self._names, self._held[start : at + end])
        if not calls:
            return self._no_call()
        for name, arguments in calls:
            self._tell_call(name)
            self._pieces.append(Arguments(arguments))
        self._held = self._held[at + end :]
        self._read = self._read_end
        return True

    def _is_no_json(self, begun: str) -> bool:
        """Whether no text can complete it. Looked at whenever it has doubled."""
        if len(begun) < 2 * self._checked_at:
            return False
        self._checked_at = len(begun)
        return not could_be_json(begun)

    def _tell_call(self, name: str) -> None:
        self._pieces.append(CallBegun(f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1


def _openings(form: ToolFormat) -> tuple[str, ...]:
    """What prose is held back for."""
    return (form.mark, form.before + form.mark) if form.mark else ()


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that ``mark`` begins with."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
