"""Processes that have imported the modules of child processes, and fork one wherever a test starts one.

A process that runs an engine, or a command, imports for seconds and works for a few milliseconds. A fork of a
template has the imports already; everything else is as in a new process: its parent, its process group, its
environment, its descriptors and its main module. A forked command has a template itself, for its engines.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from agentflow.engine.machine import child_process

ENGINE = "agentflow.engine.process.worker"
COMMAND = "agentflow"
RANK = "agentflow.engine.models.tensor_parallel.rank_process"
FORK_RANKS = "AGENTFLOW_TESTS_FORK_RANKS"
"""A variable with which engine processes fork their ranks, too: each has a template for them then."""
_COMPILER, _READER = "support.compile_worker", "agentflow.engine.media.worker"
_IMPORTED = (
    (
        "agentflow.engine.models.torch_runner",
        "support.engine_loaders",
        ENGINE,
        RANK,
        "agentflow.cli.main",
        "agentflow.server.serve",
        "agentflow.server.models.open_models",
        "agentflow.backends.remote",
        "agentflow.engine.grammar.compiler.compile",
        "anyio._backends._asyncio",
        "anyio._backends._trio",
    ),
    ("agentflow.engine.grammar.compiler.compile", _COMPILER),
    ("av", "PIL.ImageOps", _READER),
)
"""The imports of each template. Tests limit the memory of the last two."""
_OF_TESTS = {ENGINE: 0, RANK: 0, COMMAND: 0, _COMPILER: 1, _READER: 2}
_OF_COMMANDS = {ENGINE: 0, "agentflow.engine.grammar.compiler.worker": 0}
_OF_ENGINES = {RANK: 0}
"""The main modules of processes, and the templates from which tests, commands and engines fork them."""
_PYTHON = sys.executable
_MOST_BYTES = 2**17
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MADV_COLLAPSE, _HUGE_PAGE_BYTES = 25, 2**21
_FORKS_OF_SMALL_PAGES = 8


def process_name(module: str) -> str:
    """The name of a forked process with this main module. Its command line is its template's."""
    return module.removesuffix(".worker").rpartition(".")[2]


class ProcessTemplate:
    """A template. ``wait`` returns when it has ended."""

    def __init__(self, connection: socket.socket, wait: Callable[[], object]) -> None:
        self._connection = connection
        self._wait = wait

    @classmethod
    def start(cls, number: int, environment: dict[str, str]) -> ProcessTemplate:
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(other.fileno()), str(number)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        return cls(connection, process.wait)

    @classmethod
    def with_these_imports(cls) -> ProcessTemplate:
        """A fork of this process, which has no other thread."""
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.setpgid(0, 0)
            _fork_when_asked(other)
        other.close()
        return cls(connection, lambda: os.waitpid(pid, 0))

    def fork(self, asked: list[Any], descriptors: list[int]) -> int:
        """Returns the number of a new process, a child of this one. ``asked``: the arguments of ``_become``
        before its last one."""
        _adopt_orphans(True)
        try:
            socket.send_fds(self._connection, [json.dumps(asked).encode()], descriptors)
            return int(self._connection.recv(64))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        """Ends the template, but none of the processes that it has forked."""
        self._connection.close()
        self._wait()


def _adopt_orphans(does: bool) -> None:
    """Whether orphans below this process become its children. The template forks twice, so that the process
    that asked for a fork becomes its parent, which can wait for its end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


class _Forked(subprocess.Popen[Any]):
    """A process that ``fork`` makes; all else is Popen's."""

    def __init__(
        self, fork: Callable[[list[Any], list[int]], int], command: Sequence[str], **options: Any
    ) -> None:
        self._fork = fork
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        """Called by Popen with the pipes that it has made; -1 where a stream is inherited."""
        command, _, _, _, pass_fds, folder, environment = given[:7]
        pipes, (*_, is_session, process_group) = given[10:16], given[16:]
        streams = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        group = None if is_session else 0 if process_group == 0 else os.getpgrp()
        environment = dict(os.environ if environment is None else environment)
        words = [os.fspath(word) for word in command[1:]]
        asked = [words, environment, os.fspath(folder or os.getcwd()), group, [0, 1, 2, *pass_fds]]
        try:
            self.pid = self._fork(asked, [*streams, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Templates:
    """The templates of this process, which start when they are needed. ``numbers``: by main module."""

    def __init__(self, numbers: dict[str, int], started: dict[int, ProcessTemplate]) -> None:
        self._numbers, self._started = numbers, started
        self._lock = threading.Lock()
        self._path = child_process.import_path()
        self._paths = (self._path, os.environ.get("PYTHONPATH"))

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` for commands with ``-m``, which forks the module's template, if it has one."""
        number = self._numbers.get(command[command.index("-m") + 1])
        # With another path it may import other files than the template has.
        path = (options.get("env") or os.environ).get("PYTHONPATH")
        if number is None or path not in self._paths or command[0] != _PYTHON:
            return subprocess.Popen(command, **options)
        return self.forked(number, command, **options)

    def forked(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` of a command of Python, which this template forks."""

        def fork(asked: list[Any], descriptors: list[int]) -> int:
            with self._lock:
                if number not in self._started:
                    environment = {**(options.get("env") or os.environ), "PYTHONPATH": self._path}
                    self._started[number] = ProcessTemplate.start(number, environment)
                try:
                    return self._started[number].fork(asked, descriptors)
                except BaseException:  # a time-out: the next fork would take its answer
                    self._started.pop(number).close()
                    raise

        return _Forked(fork, command, **options)

    def close(self) -> None:
        for template in self._started.values():
            template.close()


_templates: _Templates | None = None


@contextmanager
def forked_processes() -> Iterator[None]:
    """Lets ``child_process`` and ``start_command`` start their processes from templates, on Linux."""
    global _templates
    if sys.platform != "linux":
        yield
        return
    _templates = _Templates(_OF_TESTS, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "_popen", _templates.popen)
        yield
    _templates.close()
    _templates = None


def start_command(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """``agentflow`` with these arguments, in a process. ``options``: of Popen."""
    return start_python("-m", COMMAND, *arguments, **options)


def start_python(*arguments: str | Path, **options: Any) -> subprocess.Popen[Any]:
    """Python with these arguments, in a process that may have imported agentflow. ``options``: of Popen."""
    command = [sys.executable, *arguments]
    if _templates is None:
        return subprocess.Popen(command, **options)
    return _templates.forked(_OF_TESTS[COMMAND], command, **options)  # type: ignore[arg-type]


def main() -> None:
    """The template itself: forks until its connection closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # for the reason in tests/conftest.py
    gc.disable()  # imports leave little garbage
    for name in _IMPORTED[int(sys.argv[2])]:
        importlib.import_module(name)
    if cli := sys.modules.get("agentflow.cli.main"):
        cli._commands()  # which imports them
    gc.collect()
    gc.freeze()
    gc.enable()
    # Torch deletes each of its libraries of operators at exit, which takes longer than a fork.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    _fork_when_asked(connection)


def _use_huge_pages() -> None:
    """Moves the memory of this process to huge pages, where the kernel can. To fork it, and to end a fork,
    takes time for each page. The move itself takes as long as some ten forks."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, permissions, _, _, file, *_ = line.split()
        first, last = [int(end, 16) for end in ends.split("-")]
        if permissions == "rw-p" and file == "0" and last - first >= _HUGE_PAGE_BYTES:
            madvise(first, last - first, _MADV_COLLAPSE)


def _fork_when_asked(connection: socket.socket) -> NoReturn:
    num_forks = 0
    while True:
        if num_forks == _FORKS_OF_SMALL_PAGES:
            _use_huge_pages()
        num_forks += 1
        asked, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 16)
        if not asked:
            os._exit(0)
        answer = _forked_twice()
        if answer is None:
            connection.close()
            _become(*json.loads(asked), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(answer)


def _forked_twice() -> bytes | None:
    """The number of a new process whose parent has ended. None in this process."""
    read_end, write_end = os.pipe()
    if between := os.fork():
        os.close(write_end)
        os.waitpid(between, 0)
        with open(read_end, "rb") as pipe:
            return pipe.read()
    if pid := os.fork():
        os.write(write_end, b"%d" % pid)
        os._exit(0)
    os.close(read_end)
    os.close(write_end)
    return None


def _become(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    group: int | None,
    want: list[int],
    have: list[int],
) -> NoReturn:
    """Runs a command of Python. ``group``: a process group; None for a new session, in the terminal
    that the input is, if it is one. ``have``: the descriptors that are duplicated as ``want``."""
    if group is None:
        os.setsid()
    else:
        os.setpgid(0, group)
    apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(want) + 1) for descriptor in have]
    for descriptor in have:
        os.close(descriptor)
    for descriptor, number in zip(apart, want, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if group is None and os.isatty(0):
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # it becomes the session's
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code: object = None
    try:
        _run(command)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # Like a usual end, but without the destruction of all modules: with torch it takes five times as
    # much processor time as everything else that most of these processes do.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _run(command: list[str]) -> None:
    """Runs ``-m MODULE``, ``-c CODE`` or ``FILE``, after options."""
    while (option := command.pop(0)) in ("-P", "-W"):
        if option == "-W":
            warnings._processoptions([command.pop(0)])  # type: ignore[attr-defined]
    what = command.pop(0) if option in ("-m", "-c") else option
    sys.argv[:] = [option, *command]
    name = process_name(what) if option == "-m" else "python"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    if option == "-m" and what != COMMAND:
        sys.modules.pop(what, None)  # the template has imported it
        if what == ENGINE and FORK_RANKS in os.environ:
            started = {0: ProcessTemplate.with_these_imports()}
            child_process._popen = _Templates(_OF_ENGINES, started).popen
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    # Scripts start engines rarely, and can start a template then.
    started = {0: ProcessTemplate.with_these_imports()} if option == "-m" else {}
    child_process._popen = _Templates(_OF_COMMANDS, started).popen
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    main()
