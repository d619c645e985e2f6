"""The connections of an actor, without Ray."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentflow.cluster.ray import host as host_module
from agentflow.cluster.ray.child import Heartbeat
from agentflow.cluster.ray.host import BEAT_S, ENGINE, LOST_S, TOKEN_BYTES, WATCH, EngineHost, exchange_beats

TOKEN = b"t" * TOKEN_BYTES


def connected(listener: socket.socket, head: bytes) -> socket.socket:
    connection = socket.create_connection(listener.getsockname(), 10)
    connection.sendall(head)
    return connection


def test_only_connections_with_the_token_are_accepted():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(EngineHost(TOKEN)._accept, listener)
        refused = [
            connected(listener, b"x" * TOKEN_BYTES + ENGINE),
            connected(listener, TOKEN + b"?"),
            connected(listener, TOKEN + ENGINE),
            connected(listener, TOKEN + ENGINE),  # the second of its kind
        ]
        kept = refused.pop(2)
        watch = connected(listener, TOKEN + WATCH)
        engine_end, watch_end = accepted.result(30)
        assert engine_end.getpeername() == kept.getsockname()
        assert watch_end.getpeername() == watch.getsockname()
        for one in refused:
            with one:
                assert one.recv(1) == b""
        for one in (kept, watch, engine_end, watch_end):
            one.close()


def test_strangers_that_send_nothing_do_not_delay_the_server(monkeypatch):
    monkeypatch.setattr(host_module, "CONNECT_S", 10.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        strangers = [connected(listener, b"t" * (number % 2)) for number in range(100)]
        accepted = pool.submit(EngineHost(TOKEN)._accept, listener)
        ours = [connected(listener, TOKEN + kind) for kind in (WATCH, ENGINE)]
        theirs = accepted.result(30)
        assert [one.getpeername() for one in theirs] == [one.getsockname() for one in reversed(ours)]
        theirs[0].sendall(b".")
        assert ours[1].recv(1) == b"."
        for one in strangers:
            with one, contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        for one in (*ours, *theirs):
            one.close()


def test_an_actor_that_nobody_connects_to_gives_up(monkeypatch):
    monkeypatch.setattr(host_module, "CONNECT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        EngineHost(TOKEN)._accept(listener)


def test_an_actor_that_hears_nothing_is_silent(monkeypatch):
    monkeypatch.setattr(host_module, "BEAT_S", 0.01)
    monkeypatch.setattr(host_module, "SILENT_S", 0.05)
    ours, theirs = socket.socketpair()
    beats = threading.Thread(target=exchange_beats, args=(theirs,))
    beats.start()
    with ours, theirs:
        ours.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while ours.recv(1):
                pass
        # It receives from the server again. On a busy machine a byte may be old when its next beat is due.
        ours.settimeout(0.01)
        answered = b""
        while not answered:
            ours.sendall(b".")
            with contextlib.suppress(TimeoutError):
                answered = ours.recv(1)
        assert answered == b"."
        ours.close()
        beats.join(30)
        assert not beats.is_alive()


@pytest.mark.parametrize("how", ["closes", "is silent"])
def test_the_actor_notices_that_the_server_is_gone(monkeypatch, how):
    monkeypatch.setattr(host_module, "SERVER_LOST_S", 0.05 if how == "is silent" else 3600.0)
    ours, theirs = socket.socketpair()
    beats = threading.Thread(target=exchange_beats, args=(theirs,))
    beats.start()
    with ours, theirs:
        assert ours.recv(1) == b"."
        if how == "closes":
            ours.close()
        beats.join(30)
        assert not beats.is_alive()


def test_the_server_notices_that_an_actor_is_silent_or_gone():
    ours, theirs = socket.socketpair()
    watch = Heartbeat(ours, heard_at=100.0)
    assert watch.exchange(100.0 + LOST_S)
    assert theirs.recv(1) == b"."
    # The server was suspended in the meantime: heartbeats that arrived earlier count.
    theirs.sendall(b"....")
    assert watch.exchange(200.0)
    assert watch.exchange(200.0 + LOST_S)
    assert not watch.exchange(200.0 + LOST_S + BEAT_S)
    theirs.close()
    assert not watch.exchange(200.0)
    watch.close()
