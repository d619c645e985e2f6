"""Serving in the test's event loop: addresses, TLS, start and end. Processes: test_serve_process.py."""

from __future__ import annotations

import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.faults import has_param
from support.server.http_clients import only_asyncio
from support.session_peer import HANG, HangingGenerator, Listener, gen, opened

from agentflow.backends.remote import Remote
from agentflow.errors import EngineFailed, PortInUse, ServerError, ServerLost, ServerUnreachable, UnknownModel
from agentflow.protocol import ops
from agentflow.runtime.generator import Generator
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import Tls, check_tls, listen, running_server, serve

PEMS = Path(__file__).parent.parent / "support"


anyio_backend = pytest.fixture(only_asyncio)


class Opening:
    """Opens a generator, and notes that it was closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.generator = HangingGenerator()
        self.error = error
        self.is_open = False

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Generator[Any]]:
        if self.error is not None:
            raise self.error
        self.is_open = True
        try:
            yield self.generator
        finally:
            self.is_open = False


# In the loop of the test


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", r"127\.0\.0\.1"), ("::1", r"\[::1\]"), ("localhost", ".*")]
)
async def test_a_server_answers_at_its_url_while_the_scope_lasts(host: str, shown: str) -> None:
    opening = Opening()
    async with running_server(one_model(opening), host=host) as server:
        assert re.fullmatch(rf"ws://{shown}:\d+", server.url)
        assert opening.is_open
        async with opened(Remote(server.url)) as (connection, listener):
            connection.send([ops.Open(1), ops.Text(1, ("hello",)), gen(1, 2)])
            assert await listener.text(2) == "hello"
        await server.sessions.wait_until_empty()
    assert not opening.is_open
    with pytest.raises(ServerUnreachable):
        async with Remote(server.url).connect(listener.deliver, listener.lost):
            pytest.fail("it still answers")


@pytest.mark.anyio
async def test_a_stopping_server_ends_running_work_and_notifies_its_clients() -> None:
    opening = Opening()
    listener = Listener()
    urls: list[str] = []
    has_started, may_end = anyio.Event(), anyio.Event()

    async def host() -> None:
        async with running_server(one_model(opening), limits=ServerLimits(resume_grace_s=1e6)) as server:
            urls.append(server.url)
            has_started.set()
            await may_end.wait()

    async with open_task_group() as group:
        group.start_soon(host)
        await has_started.wait()
        async with Remote(urls[0]).connect(listener.deliver, listener.lost) as connection:
            connection.send([ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2)])
            await listener.wait_for(lambda received: 2 in received.texts)
            may_end.set()
            error = await listener.wait_until_lost()
    assert isinstance(error, ServerLost)
    assert (opening.generator.num_open, opening.generator.num_running) == (0, 0)


@pytest.mark.anyio
async def test_errors_of_the_block_and_of_the_generator_leave_as_themselves() -> None:
    with pytest.raises(UnknownModel, match="no model"):
        async with running_server(one_model(Opening(UnknownModel("no model")))):
            pytest.fail("it started")
    opening = Opening()
    with pytest.raises(ZeroDivisionError):
        async with running_server(one_model(opening)):
            raise ZeroDivisionError
    assert not opening.is_open


@pytest.mark.anyio
async def test_cancelling_a_server_is_a_clean_end() -> None:
    opening = Opening()
    listener = Listener()
    with anyio.CancelScope() as scope:
        async with (
            running_server(one_model(opening)) as server,
            Remote(server.url).connect(listener.deliver, listener.lost) as connection,
        ):
            connection.send([ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2)])
            await listener.wait_for(lambda received: 2 in received.texts)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not opening.is_open
    assert (opening.generator.num_open, opening.generator.num_running) == (0, 0)


@pytest.mark.anyio
async def test_signal_handlers_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with running_server(one_model(Opening())):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# TLS


@pytest.mark.anyio
async def test_a_server_on_tls_is_reached_with_its_certificate(tmp_path: Path) -> None:
    pem = PEMS / "localhost_for_tests.pem"
    context = ssl.create_default_context(cafile=pem)
    async with running_server(one_model(Opening()), tls=Tls(pem, pem)) as server:
        assert server.url.startswith("wss://")
        url = server.url.replace("127.0.0.1", "localhost")
        async with opened(Remote(url, ssl_context=context)) as (connection, listener):
            connection.send([ops.Open(1), ops.Text(1, ("hello",)), gen(1, 2)])
            assert await listener.text(2) == "hello"
    opening = Opening()
    for wrong in (tmp_path / "none.pem", Path(__file__)):
        with pytest.raises(ServerError, check=has_param("tls")):
            async with running_server(one_model(opening), tls=Tls(wrong, wrong)):
                pytest.fail("it started")
    assert not opening.is_open


@pytest.mark.parametrize(
    ("key", "password", "why"),
    [
        (
            "encrypted_key_for_tests.pem",
            None,
            r"tls_key: .* is encrypted: set AGENTFLOW_SERVE_TLS_KEY_PASSWORD",
        ),
        ("encrypted_key_for_tests.pem", "wrong", "tls_key_password does not decrypt"),
        ("encrypted_key_for_tests.pem", "open", "tls_key: .* is not the key of"),
        (__file__, None, "tls_key: .* is not a private key in PEM format"),
    ],
)
def test_f37_an_unusable_key_is_named_without_a_question_at_the_terminal(
    key: str, password: str | None, why: str
) -> None:
    with pytest.raises(ServerError, match=why):
        check_tls(Tls(PEMS / "localhost_for_tests.pem", PEMS / key, password))


def test_f37_an_unusable_certificate_is_named() -> None:
    with pytest.raises(ServerError, match=r"tls_cert: .* is not a certificate in PEM format"):
        check_tls(Tls(Path(__file__), PEMS / "localhost_for_tests.pem"))


def test_f37_a_weak_certificate_is_refused_with_the_reason() -> None:
    weak = PEMS / "weak_certificate_for_tests.pem"  # RSA with 1,024 bits
    with pytest.raises(ServerError, match="EE_KEY_TOO_SMALL"):
        check_tls(Tls(weak, weak))


# Addresses


def test_an_occupied_port_is_one_clear_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        opening = Opening(EngineFailed("loaded"))
        with pytest.raises(PortInUse) as caught:
            serve(running_server(one_model(opening), port=port))
    assert f"port {port} of 127.0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_port_is_free_again_right_after_its_server_ended() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted = _accept(first)
        accepted.close()  # the server's side hangs up first, and waits out its packets
        client.close()
    listen("127.0.0.1", port).close()


def _accept(listener: socket.socket) -> socket.socket:
    listener.setblocking(True)
    accepted, _ = listener.accept()
    return accepted


@pytest.mark.parametrize(
    ("host", "port"),
    [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000), ("127.0.0.1", -1), ("a" * 70, 0)],
)
def test_an_address_that_cannot_be_had_is_one_clear_line(host: str, port: int) -> None:
    with pytest.raises(ServerError, match=rf"{port}\b.*{host}") as caught:
        listen(host, port)
    assert not isinstance(caught.value, PortInUse)
    assert "\n" not in str(caught.value)
