"""``main``: its streams in any locale, and how it ends."""

from __future__ import annotations

import io
import os
import sys

import pytest

from agentflow.cli import main as cli
from agentflow.cli.chat import _read_line
from agentflow.cli.main import main
from agentflow.errors import BadArgument


def test_f37_output_to_a_file_is_utf8_in_any_locale(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["config", "--model", "größe"]) == 0
    assert 'path = "größe"' in written.getvalue().decode()


def test_f37_another_encoding_of_files_can_be_chosen(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert main(["config", "--model", "größe"]) == 0
    assert 'path = "größe"'.encode("latin-1") in written.getvalue()


def test_f37_characters_that_a_terminal_lacks_are_question_marks(monkeypatch):
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["config", "--model", "größe"]) == 0
    assert b'path = "gr??e"' in shown.getvalue()


def test_f37_a_full_disk_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["config"]) == 1
        assert capsys.readouterr().err == "agentflow: [Errno 28] No space left on device\n"


def test_f37_a_reader_that_leaves_is_no_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["config"]) == 141
        assert capsys.readouterr().err == ""


def test_f37_closed_streams_are_replaced(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["config"]) == 0
    assert not sys.stdin.isatty()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_f37_an_interrupt_while_commands_are_imported(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_commands", interrupted)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "agentflow: interrupted\n"


def test_f37_input_that_is_not_utf8_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(BadArgument, match="standard input is not UTF-8"):
        _read_line()


@pytest.mark.parametrize(("is_terminal", "errors"), [(True, "replace"), (False, "strict")])
def test_f37_only_files_must_be_valid_utf8(monkeypatch, is_terminal, errors):
    class Input(io.BytesIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = io.TextIOWrapper(Input(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["config"]) == 0
    assert stream.errors == errors
