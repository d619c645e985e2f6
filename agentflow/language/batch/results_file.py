"""The results of a map in a file, from which a later map of the same program continues.

The first line names the program. Each further line is one input that has ended: its ``key``, its ``input``,
its ``tokens``, and its ``result`` or ``error``. Lines are appended in the order in which the inputs end. When
all have ended, the file is rewritten with one line for each, in the order of the inputs.

A line is written before its result is used, so a process that is killed loses no result. ``sync`` makes the
lines last through a crash of the machine. An incomplete last line is dropped when the file is opened.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from agentflow.errors import AgentflowError, BadArgument, short_repr
from agentflow.language.batch.inputs import Key, KeyOf, function_of
from agentflow.language.graphs.graph import Graph
from agentflow.language.typed.json_form import JsonForm, as_plain, json_text
from agentflow.protocol.events import Usage
from agentflow.runtime.locked_file import open_locked, write_all
from agentflow.version import __version__

FORMAT: Final = 1
_MARK: Final = b'{"agentflow_map":'


class _Header(msgspec.Struct):
    """``agentflow_map``: the format. ``source``: a digest of the program's source."""

    agentflow_map: int
    version: str
    program: str
    source: str | None = None


class _Failure(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct, omit_defaults=True):
    key: Key
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: _Failure | msgspec.UnsetType = msgspec.UNSET
    tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class _Place(NamedTuple):
    """Where the last line of a key is."""

    at: int
    size: int
    has_result: bool


class ResultsFile:
    """Made by ``open``."""

    def __init__(self, path: str, descriptor: int, form: JsonForm) -> None:
        self._path = path
        self._file = descriptor
        self._form = form
        self._places: dict[Key, _Place] = {}
        self._num_lines = 0
        self._size = 0
        self._header = b""

    @classmethod
    def open(cls, path: str | os.PathLike[str], program: Any, form: JsonForm) -> ResultsFile:
        """Opens or creates the file, and locks it until ``close``. ``BadArgument`` if another map writes to
        it, if it is of another program, or if it is no such file."""
        file = cls(os.fspath(path), _locked(os.fspath(path)), form)
        try:
            file._load(_Header(FORMAT, __version__, program_name(program), _source(program)))
        except BaseException:
            os.close(file._file)
            raise
        return file

    def _load(self, ours: _Header) -> None:
        with open(self._file, "rb", closefd=False) as lines:
            lines.seek(0)
            first = lines.readline()
            if not first.endswith(b"\n") and (_MARK.startswith(first) or first.startswith(_MARK)):
                first = b""  # new, or its writer was stopped within the first line
                os.ftruncate(self._file, 0)
                self._write(msgspec.json.encode(ours) + b"\n")
            else:
                self._check_header(first, ours)
                self._size = len(first)
            self._header = first or msgspec.json.encode(ours) + b"\n"
            for number, line in enumerate(lines, start=2):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, self._size)
                    break
                try:
                    entry = msgspec.json.decode(line, type=_Line)
                except msgspec.MsgspecError as error:
                    raise self._wrong(f"line {number} is not a result of a map ({error})") from None
                self._note(entry.key, len(line), entry.result is not msgspec.UNSET)

    def _check_header(self, line: bytes, ours: _Header) -> None:
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._wrong("it is not a file of results: give the path of a new file") from None
        if header.agentflow_map != FORMAT:
            raise self._wrong(
                f"agentflow {header.version} wrote it in format {header.agentflow_map}, and this is format "
                f"{FORMAT}"
            )
        if header.program != ours.program:
            raise self._wrong(
                f"it has the results of program {header.program!r}, not of {ours.program!r}: give each "
                "program a file of its own"
            )
        if header.source is not None and ours.source is not None and header.source != ours.source:
            warnings.warn(
                f"program {ours.program!r} has changed since {self._path} was begun: its results of earlier "
                "runs are kept. Remove the file to run all inputs again",
                stacklevel=2,
            )

    def _wrong(self, why: str) -> BadArgument:
        return BadArgument(f"resume: {self._path}: {why}", param="resume")

    def has_result(self, key: Key) -> bool:
        """Whether the input need not run again."""
        place = self._places.get(key)
        return place is not None and place.has_result

    def result(self, key: Key) -> Any:
        """The result of an input that has one. ``BadArgument`` if the program returns another type now."""
        place = self._places[key]
        line = msgspec.json.decode(os.pread(self._file, place.size, place.at), type=_Line)
        assert isinstance(line.result, msgspec.Raw)
        return self._as_result(bytes(line.result), f"the result for key {key!r}")

    def _as_result(self, data: bytes, what: str) -> Any:
        try:
            return self._form.read(data)
        except ValueError as error:
            raise self._wrong(f"{what} is not of the program's return type: {error}") from None

    def add_result(self, key: Key, item: Any, result: Any, usage: Usage) -> Any:
        """Appends a result. Returns it as ``result`` will read it. ``BadArgument`` if it has no form in
        JSON."""
        try:
            data = json_text(self._form.plain(result)).encode()
        except ValueError as error:
            raise BadArgument(
                f"resume: the program returned {short_repr(result)}, which cannot be kept as JSON: {error}",
                param="resume",
            ) from None
        found = self._as_result(data, "what the program returned")
        self._add(_Line(key, _raw(item), msgspec.Raw(data), tokens=_tokens(usage)))
        return found

    def add_failure(self, key: Key, item: Any, error: Exception, usage: Usage) -> None:
        """Appends a failure. The input runs again when the file is next opened."""
        code = error.code if isinstance(error, AgentflowError) else type(error).__name__
        message = str(error).encode(errors="replace").decode()  # a lone surrogate has no form in a file
        self._add(_Line(key, _raw(item), error=_Failure(code, message), tokens=_tokens(usage)))

    def _add(self, line: _Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        self._write(data)
        self._size -= len(data)
        self._note(line.key, len(data), line.result is not msgspec.UNSET)

    def _note(self, key: Key, size: int, has_result: bool) -> None:
        self._places[key] = _Place(self._size, size, has_result)
        self._size += size
        self._num_lines += 1

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._file, data)
        except OSError:
            with suppress(OSError):  # a part of a line must not precede other lines
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def sync(self) -> None:
        """Waits until what was added is on the disk."""
        os.fsync(self._file)

    def close(self, order: Sequence[Key] | None = None) -> None:
        """Syncs, unlocks and closes the file. ``order``: if all inputs have ended, their keys, for the
        order of the lines; lines of other inputs follow."""
        try:
            self.sync()
            if order is not None:
                places = self._places
                known = [key for key in order if key in places]
                keys = dict.fromkeys([*known, *sorted(places, key=lambda key: places[key].at)])
                starts = [places[key].at for key in keys]
                if starts != sorted(starts) or self._num_lines > len(starts):
                    self._rewrite([places[key] for key in keys])
        finally:
            os.close(self._file)

    def _rewrite(self, places: Iterable[_Place]) -> None:
        temporary = f"{self._path}.tmp"
        try:
            with open(temporary, "wb") as file:
                os.fchmod(file.fileno(), os.fstat(self._file).st_mode & 0o7777)
                file.write(self._header)
                for place in places:
                    file.write(os.pread(self._file, place.size, place.at))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        folder = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked(path: str) -> int:
    """The open file, which no one else writes to."""
    try:
        return open_locked(path)
    except BlockingIOError:
        raise BadArgument(
            f"resume: {path}: another map is writing to it: wait for its end, or give another file",
            param="resume",
        ) from None
    except OSError as error:
        raise BadArgument(f"resume: {path} cannot be opened: {error.strerror}", param="resume") from None


def _raw(item: Any) -> msgspec.Raw | msgspec.UnsetType:
    """The input as JSON; left out if it has no such form and a key identifies it."""
    with suppress(ValueError):
        return msgspec.Raw(json_text(item, is_read_back=False).encode())
    return msgspec.UNSET


def _tokens(usage: Usage) -> dict[str, int]:
    return {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}


def identity_of(item: Any) -> bytes:
    """JSON with equal bytes for equal inputs. ``ValueError`` if the input has no such form."""
    try:
        plain = as_plain(item, is_read_back=False, order="deterministic")
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True).encode()
    except (TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


class Keys:
    """The keys of inputs. Without ``key``, an input is identified by its JSON, and equal inputs by their
    order. With ``key``, ``BadArgument`` if two inputs have the same one."""

    def __init__(self, key: KeyOf | None) -> None:
        self._key = key
        self._counts: dict[Key, int] = {}

    def __call__(self, item: Any) -> Key:
        key = self._found(item)
        count = self._counts.get(key, 0) + 1
        self._counts[key] = count
        if count == 1:
            return key
        if self._key is not None:
            raise BadArgument(
                f"map: two inputs have the key {key!r}: give a key= that tells the inputs apart", param="key"
            )
        return f"{key}#{count}"

    def _found(self, item: Any) -> Key:
        if self._key is None:
            try:
                return hashlib.blake2b(identity_of(item), digest_size=12).hexdigest()
            except ValueError as error:
                raise BadArgument(
                    f"map: resume identifies an input by its JSON, and {short_repr(item)} has none "
                    f"({error}): give key=, a field or a function that identifies an input",
                    param="key",
                ) from None
        try:
            key = self._key(item) if callable(self._key) else _field(item, self._key)
        except (KeyError, IndexError, AttributeError):
            raise BadArgument(
                f"map: key={self._key!r}: input {short_repr(item)} has no such field", param="key"
            ) from None
        if isinstance(key, bool) or not isinstance(key, Key):
            raise BadArgument(f"map: the key of an input is a string or an integer, not {key!r}", param="key")
        return key


def _field(item: Any, name: str) -> Any:
    return item[name] if isinstance(item, dict) else getattr(item, name)


def program_name(program: Any) -> str:
    """The name of a program, by which a file is recognized."""
    if isinstance(program, Graph):
        return program.name
    function = function_of(program)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _source(program: Any) -> str | None:
    try:
        source = inspect.getsource(function_of(program))
    except (OSError, TypeError):  # a graph, or a function of an interactive session
        return None
    return hashlib.blake2b(textwrap.dedent(source).encode(), digest_size=8).hexdigest()


def result_form(program: Any) -> JsonForm:
    """The form of the program's results: of its annotated return type, or else plain JSON. ``BadArgument`` if
    that type has no form in JSON, or cannot be read back from it."""
    kind: Any = Any
    if not isinstance(program, Graph):
        with suppress(Exception):  # an annotation may be undefined here
            kind = get_type_hints(function_of(program)).get("return", Any)
    if kind in (object, type(None)):
        kind = Any
    try:
        return JsonForm(kind, "map: resume keeps results as JSON")
    except BadArgument as error:
        raise BadArgument(str(error), param="resume") from None
