"""One session over a real websocket, frame by frame in JSON, and the error that ends it: for the test of
docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from support.api_errors import TIMEOUT_S, port_of
from support.api_server import ApiServer
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from agentflow.protocol.wire import VERSION

HELLO = {"frame": "hello", "version": VERSION}
NO_CODE = "–"


def address(server: ApiServer, path: str = "/v1/session") -> str:
    return f"ws://127.0.0.1:{port_of(server)}{path}"


@dataclass
class Session:
    """``number``: of its next op."""

    socket: ClientConnection
    number: int = 1
    welcome: dict[str, Any] = field(default_factory=dict)

    def hello(self, **fields: Any) -> dict[str, Any]:
        """Sends hello, and receives the welcome."""
        self.send({**HELLO, **fields})
        self.welcome = json.loads(self.socket.recv(TIMEOUT_S))
        return self.welcome

    @property
    def to_resume(self) -> dict[str, Any]:
        return {"session": self.welcome["session"], "secret": self.welcome["secret"]}

    def send(self, frame: Any) -> None:
        self.socket.send(json.dumps(frame))

    def ops(self, *ops: dict[str, Any]) -> None:
        self.send({"frame": "ops", "first": self.number, "ops": ops})
        self.number += len(ops)

    def end(self) -> tuple[str, str]:
        """The close code, and the code that it is refused with before."""
        refused = NO_CODE
        with contextlib.suppress(ConnectionClosed):
            while True:
                message = self.socket.recv(TIMEOUT_S)
                # Before its first frame, a client is answered in binary.
                frame = msgspec.msgpack.decode(message) if isinstance(message, bytes) else json.loads(message)
                if frame["frame"] == "refused":
                    assert frame["error"]["message"]
                    refused = f"`{frame['error']['code']}`"
        close = self.socket.protocol.close_rcvd
        assert close is not None
        return str(close.code), refused

    def failure(self, state: int | None = None) -> str:
        """The code that the first variable (or this state) fails with. The session goes on."""
        for event in self.events():
            if event["event"] == "varfailed" if state is None else event.get("state") == state:
                assert event["error"]["message"]
                self.check_goes_on(99)
                return f"`{event['error']['code']}`"
        raise AssertionError

    def check_goes_on(self, state: int) -> None:
        """A new state can be opened and awaited."""
        self.ops({"op": "open", "state": state}, {"op": "await", "state": state, "ticket": 1})
        assert any(later.get("state") == state for later in self.events())

    def events(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from json.loads(self.socket.recv(TIMEOUT_S)).get("events", [])


@contextmanager
def session(server: ApiServer, *, key: str | None = None, greets: bool = True) -> Iterator[Session]:
    """An open one. Its queue is unbounded: a full one would delay the closing handshake until its timeout."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with connect(address(server), compression=None, additional_headers=headers, max_queue=None) as socket:
        opened = Session(socket)
        if greets:
            assert opened.hello()["frame"] == "welcome"
        yield opened


def refused_handshake(
    url: str, headers: dict[str, str] | None = None, *, is_json: bool = True
) -> tuple[str, str]:
    """The status, and the headers that instruct the client."""
    try:
        with connect(url, additional_headers=headers):
            raise AssertionError("let in")
    except InvalidStatus as refused:
        answer = refused.response
        assert json.loads(answer.body or b"")["reason"] if is_json else answer.body
        telling = [f"`{name}`" for name in ("Retry-After", "WWW-Authenticate") if name in answer.headers]
        return str(answer.status_code), ", ".join(telling)


def gen(state: int = 1, var: int = 2, **fields: Any) -> dict[str, Any]:
    """A gen of four tokens."""
    params = fields.pop("params", {"max_tokens": 4})
    return {"op": "gen", "state": state, "var": var, "name": "answer", "params": params, **fields}


def text(*parts: Any, state: int = 1) -> dict[str, Any]:
    return {"op": "text", "state": state, "parts": parts}


OPEN = {"op": "open", "state": 1}
ASK: Sequence[dict[str, Any]] = (OPEN, text("Why?"))
