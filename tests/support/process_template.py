"""Processes that have imported the modules of child processes, and fork one wherever a test starts one.

A process that runs an engine, or reads an image, imports for seconds and works for a few milliseconds. A fork
of a template has the imports already; everything else is as in a new process: its parent, its process group,
its environment, its descriptors and its main module.
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
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ENGINE = "agentflow.engine.process.worker"
_IMPORTED = {
    ENGINE: ("agentflow.engine.models.torch_runner", "support.engine_loaders", ENGINE),
    "support.compile_worker": ("agentflow.engine.grammar.compiler.compile", "support.compile_worker"),
    "agentflow.engine.media.worker": ("av", "PIL.ImageOps", "agentflow.engine.media.worker"),
}
"""The main modules of the processes that are forked, and what their templates import."""
# A template has the same command line as its forks, and none that names their module.
_NUMBERS = {module: str(number) for number, module in enumerate(_IMPORTED)}
forked: dict[int, str] = {}
"""The modules of all processes that were forked, by their numbers."""
_PYTHON = sys.executable
_MOST_BYTES = 2**17
_PR_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen[bytes]):
    """A process that the template has forked for this one."""

    def __init__(self, command: list[str], pid: int) -> None:
        # What Popen's own methods read, which wait and send signals.
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class ProcessTemplate:
    """The template of processes that run ``module``. ``environment``: of the template itself."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(other.fileno()), _NUMBERS[module]],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )

    def fork(self, command: list[str], environment: dict[str, str], descriptors: tuple[int, ...]) -> int:
        """Returns the number of a new process, a child of this one."""
        asked = json.dumps([command, environment, descriptors]).encode()
        _adopt_orphans(True)
        try:
            socket.send_fds(self._connection, [asked], [1, 2, *descriptors])
            return int(self._connection.recv(64))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        """Ends the template, but none of the processes that it has forked."""
        self._connection.close()
        self._process.wait()


def _adopt_orphans(does: bool) -> None:
    """Whether orphans below this process become its children. The template forks twice, so that what it has
    forked is a child of the process that asked for it, which can wait for its end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


@contextmanager
def forked_processes() -> Iterator[None]:
    """Lets ``child_process`` start its processes from templates, on Linux."""
    if sys.platform != "linux":
        yield
        return
    from agentflow.engine.machine import child_process

    templates: dict[str, ProcessTemplate] = {}
    lock = threading.Lock()
    path = child_process.import_path()

    def popen(command: list[str], *, pass_fds: list[int], **options: Any) -> subprocess.Popen[bytes]:
        module, environment = command[3], options["env"]
        # With another path it may import other files than the template has.
        if command[0] != _PYTHON or module not in _IMPORTED or environment["PYTHONPATH"] != path:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        with lock:
            if module not in templates:
                templates[module] = ProcessTemplate(module, environment)
            try:
                pid = templates[module].fork(command[3:], environment, tuple(pass_fds))
            except BaseException:  # such as a time-out: its answer would be taken for that of the next fork
                templates.pop(module).close()
                raise
        forked[pid] = module
        return Forked(command, pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "_popen", popen)
        yield
    for template in templates.values():
        template.close()


def main() -> None:
    """The template itself: forks until its connection closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    module = [*_IMPORTED][int(sys.argv[2])]
    for name in _IMPORTED[module]:
        importlib.import_module(name)
    del sys.modules[module]  # it is the main module of each fork
    gc.collect()
    gc.freeze()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 16)
        if not asked:
            return
        command, environment, numbers = json.loads(asked)
        answer = _forked_twice()
        if answer is None:
            connection.close()
            _become(command, environment, descriptors, [1, 2, *numbers])
            return
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


def _become(command: list[str], environment: dict[str, str], have: list[int], want: list[int]) -> None:
    os.setpgid(0, 0)
    apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(want) + 1) for descriptor in have]
    for descriptor in have:
        os.close(descriptor)
    for descriptor, number in zip(apart, want, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = command[1:]
    code = None
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    # As Python ends a process, but without the destruction of all modules: with torch it takes five times as
    # much processor time as everything else that most of these processes do.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code or 0))


if __name__ == "__main__":
    main()
