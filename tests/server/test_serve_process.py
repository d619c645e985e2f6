"""``serve`` in a separate process: its output, and the effect of signals while it loads, serves and ends."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from support.process_template import start_python
from support.session_peer import HANG, gen, opened

from agentflow.backends.remote import Remote
from agentflow.errors import ServerLost
from agentflow.protocol import ops

TIMEOUT_S = 30

# It prints its port. The models load until a line is read, and with the argument "closes slowly" close when
# another one is.
CHILD = """
import logging
import sys
from contextlib import asynccontextmanager
import anyio
from support.session_peer import HangingGenerator, opened
from agentflow.server import serve as serve_module
from agentflow.server.models.models import one_model

listen = serve_module.listen

def noted(host, port):
    listener = listen(host, port)
    print(listener.getsockname()[1], flush=True)
    return listener

serve_module.listen = noted

async def read_line():
    await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)

@asynccontextmanager
async def open_generator():
    print("loading", flush=True)
    try:
        await read_line()
        yield HangingGenerator()
    finally:
        if sys.argv[1:] == ["closes slowly"]:
            print("closing", flush=True)
            with anyio.CancelScope(shield=True):
                await read_line()
        print("closed", flush=True)

if sys.argv[1:]:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
serve_module.serve(serve_module.running_server(one_model(open_generator), port=0))
print("returned", flush=True)
"""


class Server:
    """The process. It has printed "loading"."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.port = int(self.line())
        assert self.line() == "loading\n"

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go_on(self) -> None:
        """Lets it go on where it waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    def status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    def end(self) -> tuple[int, str, str]:
        """Waits for its end. The exit status, and the rest of its output and of its errors."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Not ``communicate``, which skips the lines that ``readline`` has buffered.
        output, errors = self.process.stdout.read(), self.process.stderr.read()
        return self.process.wait(TIMEOUT_S), output, errors


@contextmanager
def loading_server(*arguments: str) -> Iterator[Server]:
    pipe = subprocess.PIPE
    with start_python(
        "-W", "error", "-c", CHILD, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield Server(process)
        except BaseException:
            process.kill()
            raise


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_ready_server_prints_its_addresses_and_ends_at_a_signal(number: signal.Signals) -> None:
    with loading_server() as server:
        assert (server.status("/health/live"), server.status("/health/ready")) == (200, 503)
        server.go_on()
        address = f"127.0.0.1:{server.port}"
        assert server.line() == f"agentflow serves scripted at ws://{address}\n"
        assert server.line() == f"OpenAI's API is at http://{address}/v1, Anthropic's at http://{address}\n"
        assert server.status("/health/ready") == 200

        async def client() -> Exception:
            async with opened(Remote(f"ws://{address}")) as (connection, listener):
                connection.send([ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2)])
                await listener.wait_for(lambda received: 2 in received.texts)
                server.process.send_signal(number)
                return await listener.wait_until_lost()

        error = anyio.run(client)
        assert server.end() == (0, "closed\nreturned\n", "")
    assert isinstance(error, ServerLost)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT])
def test_a_signal_ends_it_while_it_loads(number: signal.Signals) -> None:
    with loading_server() as server:
        # A probe that keeps its connection.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/health/live")
            assert connection.getresponse().read() == b'{"status":"live"}'
            server.process.send_signal(number)
            assert server.line() == "closed\n"
        server.go_on()  # for the thread that reads
        assert server.end() == (0, "returned\n", "")


def test_a_hangup_while_it_loads_is_recorded_and_one_while_it_closes_is_ignored() -> None:
    with loading_server("closes slowly") as server:
        server.process.send_signal(signal.SIGHUP)
        server.go_on()
        assert "the keys file was read again\n" in [server.line() for _ in range(3)]
        server.process.send_signal(signal.SIGINT)
        assert server.line() == "closing\n"
        server.process.send_signal(signal.SIGHUP)
        server.go_on()
        assert server.end() == (0, "closed\nreturned\n", "")
