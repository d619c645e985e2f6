"""``agentflow chat`` as a user has it: with a pipe, on a server, and in a terminal."""

from pathlib import Path

from support.chat_template_shapes import CHATML
from support.commands import run_cli
from support.engine.random_model import write_random_model
from support.session_peer import HANG
from support.terminal import END, INTERRUPT, in_a_terminal
from support.wire_server import thread_server

from agentflow.cli.chat import Answered, stats_line
from agentflow.protocol.events import Usage


def test_lines_of_a_pipe_are_turns_of_one_state(tiny):
    result = run_cli(
        "chat",
        "--model",
        str(tiny),
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        input="Name a city.\n\nAnother one.\n/exit\nnever\n",
    )
    assert result.returncode == 0
    assert len(result.stdout.split("\n")) >= 3
    lines = [line for line in result.stderr.splitlines() if "cached" in line]
    assert len(lines) == 2
    assert " 0% cached" in lines[0]
    assert " 0% cached" not in lines[1]


def test_a_server_answers_and_commands_are_obeyed():
    with thread_server() as server:
        result = run_cli(
            "chat",
            "--url",
            server.url,
            "--system",
            "Be kind.",
            input="hello\n/system\n/system Be brief.\n/system\n/nonsense\n/help\n",
        )
    assert result.returncode == 0
    assert result.stdout == "kind.</system><user>hello</user><assistant>\n"  # the prompt's last word
    told = result.stderr.splitlines()
    assert told[0] == "scripted: /help lists the commands"
    assert told[2:6] == [
        "Be kind.",
        "(a new conversation)",
        "Be brief.",
        "unknown command /nonsense: /help lists the commands",
    ]


def test_f37_a_chat_gives_a_template_to_a_model_that_has_none(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "template.jinja").write_text(CHATML, encoding="utf-8")
    options = ("chat", "--model", str(folder), "--max-tokens", "2", "--temperature", "0")
    refused = run_cli(*options, input="hello\n")
    assert refused.returncode == 1
    assert "--chat-template" in refused.stderr
    answered = run_cli(*options, "--chat-template", str(tmp_path / "template.jinja"), input="hello\n")
    assert answered.returncode == 0
    assert "(2 tokens" in answered.stderr


def test_a_server_that_is_not_there_is_one_line():
    result = run_cli("chat", "--url", "ws://127.0.0.1:9", input="hello\n")
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1


def test_statistics_of_an_answer_are_one_line():
    answered = Answered("…", Usage(1200, 600, 11), "length", ttft_s=1.0, took_s=3.0)
    assert stats_line(answered) == (
        "(11 tokens, 5.0 tokens/s, first after 1,000 ms, prompt of 1,200, 50% cached, "
        "truncated at --max-tokens)"
    )
    answered = Answered("…", Usage(12, 0, 1), "eos", ttft_s=0.5, took_s=0.5)
    assert stats_line(answered) == "(1 token, first after 500 ms, prompt of 12, 0% cached)"
    assert stats_line(Answered("…", None, "stopped", 0.5, 0.75)) == "(stopped after 0.8 s)"


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves():
    with thread_server() as server, in_a_terminal("chat", "--url", server.url) as terminal:
        terminal.until("> ")
        terminal.type(f"a word {HANG}\n".encode())
        terminal.until("begun")
        terminal.type(INTERRUPT)
        terminal.until("stopped after")
        terminal.until("> ")
        terminal.type(b"hello\n")
        terminal.until("hello</user><assistant>")
        terminal.until("cached")
        terminal.until("> ")
        terminal.interrupt_until("/exit")
        terminal.until("> ")
        terminal.type(END)
        assert terminal.process.wait(timeout=30) == 0
