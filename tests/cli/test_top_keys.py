"""``agentflow top`` in a terminal: a key leaves it, and restores the terminal."""

from __future__ import annotations

import termios

import pytest
from support.terminal import INTERRUPT, in_a_terminal
from support.wire_server import thread_server


@pytest.mark.parametrize("key", [b"q", b"Q", INTERRUPT])
def test_f43l_a_key_leaves_the_live_view(key: bytes) -> None:
    with (
        thread_server() as server,
        in_a_terminal("top", "--url", server.url, "--interval", "0.1") as terminal,
    ):
        terminal.until("means over")
        assert not terminal.has_mode(termios.ICANON | termios.ECHO)
        terminal.type(b"xyz")  # other keys do nothing
        terminal.until("means over")
        terminal.type(key)
        assert terminal.process.wait(timeout=30) == 0
        assert terminal.has_mode(termios.ICANON)
        assert terminal.has_mode(termios.ECHO)
