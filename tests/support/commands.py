"""The ``agentflow`` command: in this process, in its own, and ``agentflow serve`` while a test runs."""

import io
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
from support.process_template import ENGINE, RANK, process_name, start_command, start_python

from agentflow.cli.main import main


def call_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: a second faster than ``run_cli``, for commands that load no model."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def run_cli(*arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a separate process, to its end."""
    return run_python("-m", "agentflow", *arguments, input=input)


def run_python(*arguments: str | Path, input: str = "") -> subprocess.CompletedProcess[str]:
    """Python with these arguments, to its end; it may have imported agentflow."""
    pipe = subprocess.PIPE
    with start_python(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(input, timeout=110)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server on a free port: its url and its process."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = start_command(
        "serve",
        "--port",
        "0",
        *options,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        pipesize=2**20,  # its log is read at its end: in a common pipe, about 500 requests find room
    )
    try:
        assert server.stdout is not None
        output = ""
        for line in server.stdout:
            output += line
            if "ws://" in line:
                yield "ws://" + line.partition("ws://")[2].split()[0], server
                return
        raise AssertionError(f"the server ended before it was ready:\n{output}")
    finally:
        server.terminate()
        try:
            server.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # it waits for connections that a failed test has left open
            server.terminate()
            server.communicate(timeout=10)


def engine_of(server: subprocess.Popen[str]) -> psutil.Process | None:
    """The one engine process that the server has started; None between two."""
    engines = engines_of(server.pid)
    assert len(engines) <= 1
    return engines[0] if engines else None


def engines_of(pid: int | None = None) -> list[psutil.Process]:
    """The engine processes that a process has started; by default this one."""
    return [child for child in psutil.Process(pid).children() if _is_engine(child)]


def _is_engine(process: psutil.Process) -> bool:
    """And not the process that compiles constraints, nor the template of engine processes."""
    return _runs(ENGINE, process)


def is_rank(process: psutil.Process) -> bool:
    """Whether it computes a part of a divided model, and is not the first rank."""
    return _runs(RANK, process)


def _runs(module: str, process: psutil.Process) -> bool:
    try:
        return process.name() == process_name(module) or module in process.cmdline()
    except psutil.Error:  # it has just ended
        return False
