"""The results of a map in a file, and a second file from which a later map of the same program continues.

The file of results has one line of JSON for each result and nothing else. Lines are appended in the order in
which the inputs end; when all have ended, they are put into the order of the inputs. The log, ``.resume``
next to it, has a line that names the program, and then an entry for each input that has ended: its ``key``,
the location and the CRC-32 of its result or its ``error``, and its ``tokens``.

A result is written before its entry, and both before the result is used, so a process that is killed loses no
result. ``sync`` makes them last through a crash of the machine. Opening the files drops an incomplete end: a
line or an entry that was cut, a result without an entry, entries whose results are missing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import textwrap
import warnings
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from agentflow.errors import AgentflowError, BadArgument, short_repr, shown_error
from agentflow.language.batch.inputs import InputKey, KeyOf, program_function
from agentflow.language.expressions import MediumExpression
from agentflow.language.graphs.graph import Graph
from agentflow.language.media import image, is_picture
from agentflow.language.typed.json_form import JsonForm, as_plain, json_text
from agentflow.protocol.events import Usage
from agentflow.protocol.images import Video, medium_kind
from agentflow.runtime.locked_file import append, open_locked
from agentflow.version import __version__

FORMAT: Final = 2
LOG_SUFFIX: Final = ".resume"
_MARK: Final = b'{"agentflow_map":'
_OTHER_FORMATS: Final = frozenset({".csv", ".gz", ".json", ".parquet", ".tsv", ".xlsx", ".zip"})


def check_path(path: str | os.PathLike[str]) -> None:
    """``BadArgument`` for a new file whose name has the ending of another format than lines of JSON."""
    name, ending = os.path.splitext(os.fspath(path))
    if ending.lower() in _OTHER_FORMATS and not os.path.exists(f"{name}{ending}{LOG_SUFFIX}"):
        better = os.path.basename(name).removesuffix(".jsonl")
        raise BadArgument(
            f"{name}{ending}: the results are lines of JSON: name the file {better}.jsonl", param="resume"
        )


class _Header(msgspec.Struct):
    """``agentflow_map``: the format. ``source``: a digest of the program's source."""

    agentflow_map: int
    version: str
    program: str
    source: str | None = None


class _Failure(msgspec.Struct):
    code: str
    message: str


class _Entry(msgspec.Struct, omit_defaults=True):
    """An input that has ended."""

    key: InputKey
    at: int = 0  # where its line begins in the file of results, in bytes; a failure has no line
    size: int = 0  # of the line, with its end
    crc: int = 0  # of the line
    error: _Failure | msgspec.UnsetType = msgspec.UNSET
    tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class _Location(NamedTuple):
    """Where the last entry of a key is in the log, and where its result is."""

    in_log: int
    size_in_log: int
    at: int
    size: int  # 0 without a result


class _Changed(ValueError):
    """A line is not the one that was written."""


class ResultsFile:
    """Made by ``open``."""

    def __init__(self, path: str, results: int, form: JsonForm) -> None:
        self._path = path
        self._log_path = path + LOG_SUFFIX
        self._results = results
        self._log = -1
        self._form = form
        self._locations: dict[InputKey, _Location] = {}
        self._num_entries = 0
        self._size = os.fstat(results).st_size
        self._log_size = 0
        self._header = b""

    @classmethod
    def open(cls, path: str | os.PathLike[str], program: Any, form: JsonForm) -> ResultsFile:
        """Opens or creates the two files, and locks them until ``close``. ``BadArgument`` if another map
        writes to them, if they belong to another program, or if the file was not written by a map."""
        header = _Header(FORMAT, __version__, program_name(program), _source(program))
        while True:
            file = cls(os.fspath(path), _locked(os.fspath(path)), form)
            try:
                if file._load(header):
                    return file
            except BaseException:
                file._release()
                raise
            file._release()  # the path names another file now

    def _load(self, ours: _Header) -> bool:
        """Reads the log. False if it had to finish a rewrite first: then open the files again."""
        entries = self._read_log(ours)
        if self._finish_rewrite([entry for entry, _ in entries]):
            return False
        size = 0
        for entry, size_in_log in entries:
            if entry.size:
                try:
                    if _line(self._results, entry) is None:
                        os.ftruncate(self._log, self._log_size)  # this result is lost, and all later ones
                        break
                except _Changed:
                    raise self._wrong(
                        f"the line at byte {entry.at:,} is not the one that was written: undo the change, or "
                        "give the path of a new file"
                    ) from None
                size = entry.at + entry.size
            self._note(entry, size_in_log)
        os.ftruncate(self._results, size)
        self._size = size
        return True

    def _read_log(self, ours: _Header) -> list[tuple[_Entry, int]]:
        """The entries and their sizes in the log, whose incomplete end is dropped."""
        try:
            with open(self._log_path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            content = b""
        is_log = content.startswith(_MARK) or _MARK.startswith(content)
        lines = content.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not is_log or (self._size and not lines):
            raise self._not_ours()
        mode = os.fstat(self._results).st_mode & 0o666
        self._log = os.open(self._log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        if not lines or not self._size:  # new, or there is nothing to continue from
            lines = [msgspec.json.encode(ours) + b"\n"]
            os.ftruncate(self._log, 0)
            append(self._log, lines[0])
        self._header, *rest = lines
        self._check_header(ours)
        self._log_size = len(self._header)
        os.ftruncate(self._log, sum(map(len, lines)))
        entries = []
        for number, line in enumerate(rest, start=2):
            try:
                entries.append((msgspec.json.decode(line, type=_Entry), len(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise self._wrong(f"line {number} of {self._log_path} is damaged: {error}") from None
        return entries

    def _not_ours(self) -> BadArgument:
        if os.pread(self._results, len(_MARK), 0) == _MARK:
            return self._wrong(
                "an earlier version of agentflow wrote it, with a header and the inputs in it, and it cannot "
                "be continued: give the path of a new file"
            )
        is_lost = not os.path.exists(self._log_path)
        why = f"there is no {self._log_path}" if is_lost else f"{self._log_path} is not the log of a map"
        return self._wrong(
            f"it is not a file of results, because {why}: "
            f"{'put both files there, or ' if is_lost else ''}give the path of a new file"
        )

    def _check_header(self, ours: _Header) -> None:
        try:
            header = msgspec.json.decode(self._header, type=_Header)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._not_ours() from None
        if header.agentflow_map != FORMAT:
            raise self._wrong(
                f"agentflow {header.version} wrote it in format {header.agentflow_map}, and this is format "
                f"{FORMAT}"
            )
        if header.program != ours.program:
            raise self._wrong(
                f"it has the results of program {header.program!r}, not of {ours.program!r}: give each "
                "program a separate file"
            )
        if header.source is not None and ours.source is not None and header.source != ours.source:
            warnings.warn(
                f"program {ours.program!r} has changed since {self._path} was begun: its results of earlier "
                "runs are kept. Remove the file to run all inputs again",
                stacklevel=2,
            )

    def _wrong(self, why: str) -> BadArgument:
        return BadArgument(f"resume: {self._path}: {why}", param="resume")

    def has_result(self, key: InputKey) -> bool:
        """Whether the input need not run again."""
        location = self._locations.get(key)
        return location is not None and location.size > 0

    def result(self, key: InputKey) -> Any:
        """The result of an input that has one. ``BadArgument`` if the program returns another type now."""
        location = self._locations[key]
        return self._as_result(
            os.pread(self._results, location.size, location.at), f"the result for key {key!r}"
        )

    def _as_result(self, data: bytes, what: str) -> Any:
        try:
            return self._form.read(data)
        except ValueError as error:
            raise self._wrong(f"{what} is not of the program's return type: {error}") from None

    def add_result(self, key: InputKey, result: Any, usage: Usage) -> Any:
        """Appends a result. Returns it as ``result`` will read it. ``BadArgument`` if it has no form in
        JSON."""
        try:
            data = json_text(self._form.plain(result)).encode() + b"\n"
        except ValueError as error:
            raise BadArgument(
                f"resume: the program returned {short_repr(result)}, which cannot be kept as JSON: {error}",
                param="resume",
            ) from None
        found = self._as_result(data, "what the program returned")
        append(self._results, data)
        try:
            self._add(_Entry(key, self._size, len(data), zlib.crc32(data), tokens=_tokens(usage)))
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._results, self._size)
            raise
        self._size += len(data)
        return found

    def add_failure(self, key: InputKey, error: Exception, usage: Usage) -> None:
        """Appends a failure. The input runs again when the file is next opened."""
        code = error.code if isinstance(error, AgentflowError) else type(error).__name__
        message = shown_error(error, str).encode(errors="replace").decode()  # no half of a surrogate pair
        self._add(_Entry(key, error=_Failure(code, message), tokens=_tokens(usage)))

    def _add(self, entry: _Entry) -> None:
        data = msgspec.json.encode(entry) + b"\n"
        append(self._log, data)
        self._note(entry, len(data))

    def _note(self, entry: _Entry, size_in_log: int) -> None:
        self._locations[entry.key] = _Location(self._log_size, size_in_log, entry.at, entry.size)
        self._log_size += size_in_log
        self._num_entries += 1

    def sync(self) -> None:
        """Waits until everything that was added is on the disk."""
        os.fsync(self._results)
        os.fsync(self._log)

    def close(self, order: Sequence[InputKey] | None = None) -> None:
        """Syncs, unlocks and closes the files. ``order``: if all inputs have ended, their keys, for the
        order of the lines; lines of other inputs follow."""
        try:
            self.sync()
            if order is not None:
                locations = self._locations
                known = [key for key in order if key in locations]
                keys = dict.fromkeys([*known, *sorted(locations, key=lambda key: locations[key].at)])
                starts = [locations[key].at for key in keys if locations[key].size]
                if starts != sorted(starts) or self._num_entries > len(keys):
                    self._rewrite([locations[key] for key in keys])
        finally:
            self._release()

    def _release(self) -> None:
        os.close(self._results)
        if self._log >= 0:
            os.close(self._log)

    @property
    def _new_paths(self) -> tuple[str, str]:
        """Where a rewrite puts the results and the log."""
        return f"{self._log_path}.new-results", f"{self._log_path}.new"

    def _rewrite(self, locations: Iterable[_Location]) -> None:
        """Puts the results and their entries into this order."""
        new_results, new_log = self._new_paths
        at = 0
        try:
            with open(new_results, "wb") as results, open(new_log, "wb") as log:
                os.fchmod(results.fileno(), os.fstat(self._results).st_mode & 0o7777)
                os.fchmod(log.fileno(), os.fstat(self._log).st_mode & 0o7777)
                log.write(self._header)
                for location in locations:
                    entry = msgspec.json.decode(
                        os.pread(self._log, location.size_in_log, location.in_log), type=_Entry
                    )
                    if location.size:
                        results.write(os.pread(self._results, location.size, location.at))
                        entry.at, at = at, at + location.size
                    log.write(msgspec.json.encode(entry) + b"\n")
                for file in (results, log):
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(new_log, self._log_path)
        except BaseException:
            for path in self._new_paths:
                with suppress(OSError):
                    os.unlink(path)
            raise
        # From here on, opening the files finishes the rewrite.
        os.replace(new_results, self._path)
        folder = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _finish_rewrite(self, entries: Sequence[_Entry]) -> bool:
        """Whether a rewrite was interrupted after it had replaced the log: then the results follow. The files
        of a rewrite that was interrupted earlier are removed."""
        new_results, new_log = self._new_paths
        with suppress(FileNotFoundError):
            os.unlink(new_log)
        try:
            descriptor = os.open(new_results, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            is_of_log = any(entry.size for entry in entries) and _fits(descriptor, entries)
        finally:
            os.close(descriptor)
        if is_of_log:
            os.replace(new_results, self._path)
        else:
            os.unlink(new_results)
        return is_of_log


def _line(results: int, entry: _Entry) -> bytes | None:
    """The line of an entry. None if it is missing, as after a crash of the machine, which may leave zeros.
    ``_Changed`` if it is another one."""
    data = os.pread(results, entry.size, entry.at)
    if len(data) < entry.size or b"\0" in data:
        return None
    if zlib.crc32(data) != entry.crc:
        raise _Changed
    return data


def _fits(results: int, entries: Iterable[_Entry]) -> bool:
    """Whether the file has the results of all entries."""
    try:
        return all(_line(results, entry) is not None for entry in entries if entry.size)
    except _Changed:
        return False


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


def _tokens(usage: Usage) -> dict[str, int]:
    return {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}


def canonical_json(item: Any) -> bytes:
    """JSON with equal bytes for equal inputs. ``ValueError`` if the input has no such form."""
    try:
        plain = as_plain(_with_digests(item), is_read_back=False, order="deterministic")
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True).encode()
    except (TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def _with_digests(item: Any) -> Any:
    """The input with the digests or URLs of its images and videos in their place."""
    if isinstance(item, MediumExpression):
        medium = item.medium
        frames = {"num_frames": medium.num_frames} if isinstance(medium, Video) else {}
        return {medium_kind(medium): item.file.source, **frames}
    if is_picture(item):
        return _with_digests(image(item))
    if type(item) in (list, tuple):
        return [_with_digests(one) for one in item]
    return {key: _with_digests(one) for key, one in item.items()} if isinstance(item, dict) else item


class Keys:
    """The keys of inputs. Without ``key``, an input is identified by its JSON, and equal inputs by their
    order. With ``key``, ``BadArgument`` if two inputs have the same one."""

    def __init__(self, key: KeyOf | None) -> None:
        self._key = key
        self._counts: dict[InputKey, int] = {}

    def __call__(self, item: Any) -> InputKey:
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

    def _found(self, item: Any) -> InputKey:
        if self._key is None:
            try:
                return hashlib.blake2b(canonical_json(item), digest_size=12).hexdigest()
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
        if isinstance(key, bool) or not isinstance(key, InputKey):
            raise BadArgument(f"map: the key of an input is a string or an integer, not {key!r}", param="key")
        try:
            msgspec.json.encode(key)
        except UnicodeEncodeError as error:
            raise BadArgument(f"map: the key {key!r:.200} is no Unicode: {error}", param="key") from None
        return key


def _field(item: Any, name: str) -> Any:
    return item[name] if isinstance(item, dict) else getattr(item, name)


def program_name(program: Any) -> str:
    """The name of a program, by which a file is recognized."""
    if isinstance(program, Graph):
        return program.name
    function = program_function(program)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _source(program: Any) -> str | None:
    try:
        source = inspect.getsource(program_function(program))
    except (OSError, TypeError):  # a graph, or a function of an interactive session
        return None
    return hashlib.blake2b(textwrap.dedent(source).encode(), digest_size=8).hexdigest()


def result_form(program: Any) -> JsonForm:
    """The form of the program's results: of its annotated return type, or else plain JSON. ``BadArgument`` if
    that type has no form in JSON, or cannot be read back from it."""
    kind: Any = Any
    if not isinstance(program, Graph):
        with suppress(Exception):  # an annotation may be undefined here
            kind = get_type_hints(program_function(program), include_extras=True).get("return", Any)
    if kind in (object, type(None)):
        kind = Any
    try:
        return JsonForm(kind, "map: resume keeps results as JSON")
    except BadArgument as error:
        raise BadArgument(str(error), param="resume") from None
