"""``agentflow route``: one sentence for each mistake, and a process that drains at its end."""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx2
import pytest
from support.api_server import MODEL, api_server
from support.process_template import start_command

from agentflow.cli.main import main

CLOSED = "http://127.0.0.1:9"  # nothing listens at the port for discarded data


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(capsys: pytest.CaptureFixture[str], *options: str, status: int = 2) -> str:
    """The one line that the command prints before it ends with ``status``."""
    assert main(["route", "--log-level", "error", *options]) == status
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    return shown.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--to"),
        (["--to", "127.0.0.1:8000"], "127.0.0.1:8000"),
        (["--to", "http://a?b=c"], "http://a?b=c"),
        (["--to", "http://user:secret@a"], "--to"),
        (["--to", "http://a:99999"], "99999"),
        (["--to", CLOSED, "--to", f"{CLOSED}/v1"], "twice"),
        (["--to", "http://a\x7f"], "--to"),
        (["--to", CLOSED, "--api-key", "schlüssel"], "API key"),
        (["--to", CLOSED, "--admin-key", "a\nb"], "API key"),
    ],
)
def test_f37_wrong_options(capsys: pytest.CaptureFixture[str], options: list[str], named: str) -> None:
    assert named in refused(capsys, *options)


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_f37_a_port_that_is_none_is_a_wrong_option(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["route", "--to", CLOSED, f"--port={port}"])
    assert ended.value.code == 2
    assert port in capsys.readouterr().err


def test_no_server_and_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert CLOSED in refused(capsys, "--to", CLOSED, "--port", "0", status=1)
    with listening() as port:
        assert str(port) in refused(capsys, "--to", CLOSED, "--port", str(port), status=1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"data": "abc"}',
        b"SSH-2.0-OpenSSH_9.9\r\n",
    ],
)
def test_a_server_without_the_api(capsys: pytest.CaptureFixture[str], answer: bytes) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            status = 1 if answer.startswith(b"SSH") else 2  # no answer, or an address of another server
            assert url in refused(capsys, "--to", url, "--port", "0", status=status)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
@pytest.mark.timeout(60)
def test_a_gateway_starts_without_one_server_and_drains_at_its_end() -> None:
    with api_server() as server:
        options, pipe = ["--to", CLOSED, "--to", server.url, "--port", "0"], subprocess.PIPE
        with start_command("route", *options, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                url = next(word for word in line.split() if word.startswith("http"))
                assert CLOSED in line
                assert server.url in line
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
                server.call(server.engine.gate.allow, 2)
                with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as got:
                    parts = got.iter_raw()
                    next(parts)
                    process.send_signal(signal.SIGTERM)
                    server.wait_until(lambda: httpx2.get(f"{url}/health").status_code == 503)
                    server.call(server.engine.gate.open)
                    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
                assert process.wait(20) == 0
            finally:
                process.kill()
                _, errors = process.communicate()
    assert CLOSED in errors
