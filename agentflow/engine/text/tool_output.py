"""Splits an assistant's text, as it is generated, into prose and tool calls.

``ToolOutput`` reads the text of one answer with a state machine (``_State``). If a constraint guarantees that
calls are valid, a call is reported as soon as its name is complete, and its arguments as they grow. Otherwise
a call is reported when it is complete, because it may still turn out to be prose; no text is lost. If an
answer is truncated, the beginning of a call that was not reported yet is dropped.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import AnyStr

import jiter
import msgspec
import regex

from agentflow.engine.text.tool_format import ToolFormat
from agentflow.protocol.chat import Arguments, CallBegun, ReplyPiece, TextPiece
from agentflow.protocol.unreadable import UNREADABLE


class CallMarks(msgspec.Struct, frozen=True, array_like=True):
    """The marks around a tool call in a text."""

    begin: str  # empty for calls that are the whole text, in JSON
    end: str


class _State(Enum):
    """The meaning of the held text."""

    START = auto()
    """The beginning of the answer."""
    PROSE = auto()
    CALL_HEAD = auto()
    """From the mark of a call to its arguments."""
    ARGUMENTS = auto()
    AFTER_ARGUMENTS = auto()
    """From arguments to the end of the call or list, or to the list's next call."""
    NEXT_HEAD = auto()
    """From the comma in a list of calls to the next call's arguments."""
    WHOLE_CALL = auto()
    """A call, or a list of calls, that is reported only when it is complete."""
    CALL_END = auto()
    """The end mark of a call."""
    GAP = auto()
    """White space after a call."""


class PieceReader(ABC):
    """Divides one answer into pieces, as it is generated. ``num_calls``: the calls reported so far."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._pieces: list[ReplyPiece] = []
        self._is_truncated = False
        self._extent = JsonExtent()
        self._num_read = 0  # the characters of the held text that the ``JsonExtent`` has read

    def push(self, text: str) -> list[ReplyPiece]:
        """Reads more text. Returns the pieces that are now certain."""
        self._held += text
        return self._go_on(is_over=False)

    def finish(self, rest: str = "", *, is_truncated: bool = False) -> list[ReplyPiece]:
        """Reads ``rest`` and ends the answer. Returns all remaining pieces. ``is_truncated``: the answer
        reached a limit, so that an incomplete call counts as a call."""
        self._held += rest
        self._is_truncated = is_truncated
        return self._go_on(is_over=True)

    def _go_on(self, *, is_over: bool) -> list[ReplyPiece]:
        while self._step(is_over):
            continue
        pieces, self._pieces = self._pieces, []
        return pieces

    @abstractmethod
    def _step(self, is_over: bool) -> bool:
        """Reads from the front of the held text and sets the next state. Returns False if more text is
        needed."""

    def _emit_call(self, name: str) -> None:
        self._pieces.append(CallBegun(f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1

    def _emit_arguments(self) -> bool:
        """Reports arguments as they grow. Returns whether the held text has their end."""
        if not self._held:
            return False
        end = self._extent.read(self._held)
        length = len(self._held) if end is None else end
        self._pieces.append(Arguments(self._held[:length]))
        self._held = self._held[length:]
        return end is not None


class ToolOutput(PieceReader):
    r"""Reads one answer. ``names``: the tools that may be called; if empty, nothing is read as a call.
    ``is_constrained``: a constraint guarantees valid calls. ``begins``: if given, an answer that begins with
    none of these has no calls.

    >>> output = ToolOutput(tool_format(template), ["weather"], is_constrained=True)
    >>> pieces = output.push('I look.\\n<tool_call>\\n{"name": "weather", "arguments": {"ci')
    [TextPiece('I look.'), CallBegun('call_…', 'weather'), Arguments('{"ci')]
    >>> pieces += output.push('ty": "Oslo"}}\\n</tool_call>') + output.finish()

    The division of the text into pushes affects only the division of adjacent pieces of one kind. Prose is
    held back only while it may belong to the mark of a call or separate two calls.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], *, is_constrained: bool, begins: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._form = form
        self._names = frozenset(names)
        self._begins = tuple(begins)
        self._state = _State.START if names else _State.PROSE
        self._space = ""  # white space before the mark of the current call
        self._checked_at = 0  # the length of the held text at the last check that it may be JSON
        self._marks = _openings(form) if names else ()
        self._heads = _CallHeads(form) if is_constrained and form.name_first else None

    def _step(self, is_over: bool) -> bool:
        match self._state:
            case _State.START:
                return self._read_start(is_over)
            case _State.PROSE:
                return self._read_prose(is_over)
            case _State.CALL_HEAD | _State.NEXT_HEAD:
                return self._read_head(is_over)
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.AFTER_ARGUMENTS:
                return self._read_after_arguments(is_over)
            case _State.WHOLE_CALL:
                return self._read_whole_call(is_over)
            case _State.CALL_END:
                return self._read_call_end(is_over)
            case _State.GAP:
                return self._read_gap(is_over)

    # Outside of calls

    def _read_start(self, is_over: bool) -> bool:
        """Reads the beginning of an answer. If calls have no mark, or must come first, it alone shows whether
        the answer has any."""
        if self._begins and not self._held.startswith(self._begins):
            if any(begin.startswith(self._held) for begin in self._begins):
                if not is_over:
                    return False
                if self._is_truncated and self._form.mark:
                    return self._drop_call()
            self._marks = ()
            self._state = _State.PROSE
            return True
        if self._form.mark:
            self._state = _State.PROSE
            return True
        bare = self._held.lstrip()
        if not bare:
            if is_over:
                self._emit_prose(len(self._held))
            return False
        opening = "[" if self._form.is_list else "{"
        self._state = _State.PROSE
        if bare.startswith(opening):
            self._emit_prose(len(self._held) - len(bare))
            self._begin_call()
        return True

    def _read_prose(self, is_over: bool) -> bool:
        mark = self._form.mark if self._marks else ""
        at = self._held.find(mark) if mark else -1
        if at >= 0:
            before = self._form.before
            kept = at - len(before) if self._held.endswith(before, 0, at) else at
            self._emit_prose(kept)
            self._begin_call(at - kept)
            return True
        unsure = max((overlap(self._held, m) for m in self._marks), default=0)
        if is_over and not self._is_truncated:
            unsure = 0
        self._emit_prose(len(self._held) - unsure)
        return is_over and unsure > 0 and self._drop_call()

    def _read_gap(self, is_over: bool) -> bool:
        """Drops white space between calls, and after the last one."""
        bare = self._held.lstrip()
        if not bare:
            if is_over:
                self._held = ""
            return False
        mark = self._form.mark
        if mark and mark.startswith(bare) and bare != mark:
            if is_over:
                self._held = ""  # truncated within the mark of another call
            return False
        if mark and bare.startswith(mark):
            self._begin_call(len(self._held) - len(bare))
        else:
            self._state = _State.PROSE
        return True

    def _read_call_end(self, is_over: bool) -> bool:
        end = self._form.end.strip()
        bare = self._held.lstrip()
        if not is_over and end.startswith(bare) and bare != end:
            return False
        if end and bare.startswith(end):
            self._held = bare[len(end) :]
        elif is_over and end.startswith(bare):
            self._held = ""  # truncated within the end mark
        self._state = _State.GAP
        return True

    def _emit_prose(self, length: int) -> None:
        if length:
            self._pieces.append(TextPiece(self._held[:length]))
            self._held = self._held[length:]

    # Calls

    def _begin_call(self, num_before: int = 0) -> None:
        """Begins a call. The held text has ``num_before`` characters of white space and the mark of a
        call."""
        self._space, self._held = self._held[:num_before], self._held[num_before:]
        self._extent, self._num_read, self._checked_at = JsonExtent(), 0, 0
        self._state = _State.WHOLE_CALL if self._heads is None else _State.CALL_HEAD

    def _reject_call(self) -> bool:
        """Handles held text that is not a call: its mark is prose, and the text after it is read again."""
        self._state = _State.PROSE
        self._held = self._space + self._held
        if self._form.mark:
            self._emit_prose(len(self._space) + len(self._form.mark))
        else:
            self._marks = ()
        return True

    def _read_head(self, is_over: bool) -> bool:
        """Reads a call up to its arguments; a call that does not match the constraint is read as a whole."""
        assert self._heads is not None
        head = self._heads.first if self._state is _State.CALL_HEAD else self._heads.later
        found = head.match(self._held, partial=True)
        if found is not None and found.partial:
            if not is_over:
                return False
            if self._is_truncated:
                return self._drop_call()
        name = None if found is None or found.partial else _read_name(found)
        if found is None or name is None or name not in self._names:
            self._extent, self._num_read = JsonExtent(), 0
            self._state = _State.WHOLE_CALL
            return True
        self._emit_call(name)
        self._held = self._held[found.end() :]
        self._extent = JsonExtent()
        self._state = _State.ARGUMENTS
        return True

    def _read_arguments(self) -> bool:
        is_whole = self._emit_arguments()
        if is_whole:
            self._state = _State.AFTER_ARGUMENTS
        return is_whole

    def _read_after_arguments(self, is_over: bool) -> bool:
        assert self._heads is not None
        found = self._heads.after.match(self._held, partial=True)
        if found is not None and found.partial and is_over and self._is_truncated:
            return self._drop_call()  # only markup is left
        if found is None or (is_over and found.partial):
            self._state = _State.CALL_END
            return True
        if found.partial:
            return False
        self._held = self._held[found.end() :]
        if self._form.is_list and found["more"]:
            self._held = "[" + self._held
            self._state = _State.NEXT_HEAD
        else:
            self._state = _State.CALL_END
        return True

    def _read_whole_call(self, is_over: bool) -> bool:
        mark = len(self._form.mark)
        bare = self._held[mark:].lstrip()
        is_cut = is_over and self._is_truncated and mark > 0
        if not bare:
            return is_over and (self._drop_call() if is_cut else self._reject_call())
        if bare[0] not in "{[":
            return self._reject_call()
        start = len(self._held) - len(bare)
        at = max(start, self._num_read)
        end = self._extent.read(self._held[at:])
        self._num_read = len(self._held)
        if end is None:
            if is_cut and self._heads is None and _could_be_json(bare):
                return self._read_cut_call()
            return self._reject_call() if is_over or self._is_not_json(bare) else False
        calls = _read_calls(self._form, self._names, self._held[start : at + end])
        if not calls:
            return self._reject_call()
        for name, arguments in calls:
            self._emit_call(name)
            self._pieces.append(Arguments(arguments))
        self._held = self._held[at + end :]
        self._state = _State.CALL_END
        return True

    def _read_cut_call(self) -> bool:
        """Handles an answer that was truncated within a call. If the name is complete, the rest of the call
        is reported unchanged."""
        if not self._form.name_first:
            return self._drop_call()
        self._heads = _CallHeads(self._form)
        self._state = _State.CALL_HEAD
        return True

    def _drop_call(self) -> bool:
        """Handles an answer that was truncated in the markup before the name of a call, or after a call."""
        self._held = self._space = ""
        self._state = _State.GAP
        return False

    def _is_not_json(self, begun: str) -> bool:
        """Whether no continuation makes it JSON. Checked each time its length has doubled."""
        if len(begun) < 2 * self._checked_at:
            return False
        self._checked_at = len(begun)
        return not _could_be_json(begun)


def _openings(form: ToolFormat) -> tuple[str, ...]:
    """Returns the texts for whose beginnings prose is held back."""
    return (form.mark, form.before + form.mark) if form.mark else ()


def overlap(text: AnyStr, mark: AnyStr) -> int:
    """Returns the length of the longest suffix of ``text`` that is a prefix of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _read_calls(form: ToolFormat, names: Collection[str], text: str) -> list[tuple[str, str]]:
    """Returns the names and arguments of the call, or list of calls, that is the whole ``text``. Empty if a
    part of it is not a call of a tool in ``names``."""
    if not _could_be_json(text):  # the check made while the text grows, so that both agree
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
    except (*UNREADABLE, KeyError):
        return []
    return calls


def _could_be_json(text: str) -> bool:
    """Whether the text is a prefix of some JSON."""
    try:
        jiter.from_json(text.encode(), partial_mode="trailing-strings")
        return True
    except ValueError:
        return False


def _read_name(found: regex.Match[str]) -> str | None:
    """Returns the name in a complete match of a call's head; None if it is not a JSON string."""
    try:
        return msgspec.json.decode(found["name"], type=str)
    except msgspec.MsgspecError:
        return None


class _CallHeads:
    """Patterns of the text around arguments, for formats whose calls are reported as they grow. ``first``:
    from the mark to the first arguments. ``after``: from arguments to the end of the call or list, or to the
    group ``more`` if the list continues. ``later``: from there to the next arguments."""

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
    """Finds the end of a JSON object or list in text that arrives in parts. Reads each character once and
    does not check the contents."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._after_backslash = False

    def read(self, text: str) -> int | None:
        """Reads more text. If the value ends in it, returns the number of its characters that belong to the
        value, else None. Must not be called after the end."""
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
