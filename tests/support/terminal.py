"""The ``agentflow`` command in a terminal: its screen, and a user's keys."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from support.process_template import start_command

INTERRUPT, END = b"\x03", b"\x04"


class Terminal:
    """A terminal: its screen and its keys."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = b""

    def until(self, text: str) -> str:
        """Reads until ``text`` has come, and returns all text up to its end."""
        while text.encode() not in self._unread:
            try:
                chunk = os.read(self._descriptor, 4096)
            except OSError:  # the other end is closed
                chunk = b""
            assert chunk, f"ended before {text!r} came: {self._unread.decode()}"
            self._unread += chunk
        seen, _, self._unread = self._unread.partition(text.encode())
        return (seen + text.encode()).decode()

    def interrupt_until(self, text: str) -> None:
        """Presses Ctrl-C until ``text`` comes. Between drawing the prompt and waiting for a key there is a
        moment in which readline hears a signal and waits all the same."""
        while text.encode() not in self._unread:
            self.type(INTERRUPT)
            while text.encode() not in self._unread and select.select([self._descriptor], [], [], 1.0)[0]:
                self._unread += os.read(self._descriptor, 4096)
        self.until(text)

    def has_mode(self, flag: int) -> bool:
        """Whether a local mode is set, such as ``termios.ICANON``."""
        return bool(termios.tcgetattr(self._descriptor)[3] & flag)

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)


@contextmanager
def in_a_terminal(*arguments: str, columns: int = 80) -> Iterator[Terminal]:
    """``agentflow`` with these arguments, in a terminal of this width."""
    master, slave = pty.openpty()
    process = start_command(
        *arguments,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,  # a fork finds its terminal without the function
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its controlling terminal
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def screen_lines(output: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows after this output. It knows as much as the command uses:
    the ends of lines, the cursor's move to the left, and the erasing of the rest of a line."""
    lines: list[list[str]] = [[]]  # an empty string is the second cell of a wide character
    column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", output.replace("\r\n", "\n"), re.DOTALL):
        if token == "\n":
            lines.append([])
            column = 0
        elif token.startswith("\x1b") and token.endswith("D"):
            column = max(0, min(column, width - 1) - int(token[2:-1] or 1))
        elif token.startswith("\x1b") and token.endswith("K"):
            del lines[-1][column:]
        elif not token.startswith("\x1b") and token != "\r":
            cells = cell_len(token)
            if column + cells > width:
                lines.append([])
                column = 0
            lines[-1] += [" "] * (column - len(lines[-1]))
            lines[-1][column : column + cells] = [token, *[""] * (cells - 1)]
            column += cells
    return ["".join(line) for line in lines]
