"""What a server takes from its clients."""

from __future__ import annotations

from dataclasses import dataclass

from agentflow.protocol.wire import MAX_FRAME_BYTES
from agentflow.runtime.limits import check_limits

# A Welcome and the longest error must fit into a frame.
MIN_FRAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """``frame_bytes``: of one websocket message, in either direction. ``max_sessions``: open at once, those
    in their grace period included. ``max_connections``: websockets open at once; with those of HTTP, twice as
    many connections. ``max_connections_per_address``: of both from one IPv4 address or IPv6 network of 64
    bits other than this machine. ``resume_grace_s``: how long a session outlives its connection.
    ``hello_timeout_s``: how long a new connection may stay silent. ``ping_interval_s``: a silent client is
    probed, and after as much again without an answer counts as gone. ``idle_timeout_s``: how long a
    connection may stay open before a request, and between two. ``header_timeout_s``: how long the headers of
    a request may take to arrive, and a handshake. ``session_bytes``: of memory that the ops, states and
    values of one session may hold, by estimate, and ``sessions_bytes`` those of all; the first 1 MB (half of
    what all have, in equal parts) every session may have."""

    frame_bytes: int = MAX_FRAME_BYTES
    max_sessions: int = 1_000
    max_connections: int = 2_000
    max_connections_per_address: int = 512
    resume_grace_s: float = 10.0
    hello_timeout_s: float = 10.0
    ping_interval_s: float = 20.0
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 20.0
    session_bytes: int = 256_000_000
    sessions_bytes: int = 2_000_000_000

    def __post_init__(self) -> None:
        ranges = (
            ("frame_bytes", self.frame_bytes >= MIN_FRAME_BYTES, f"at least {MIN_FRAME_BYTES}"),
            ("max_sessions", self.max_sessions >= 1, "at least 1"),
            ("max_connections", self.max_connections >= 1, "at least 1"),
            ("max_connections_per_address", self.max_connections_per_address >= 1, "at least 1"),
            ("resume_grace_s", self.resume_grace_s >= 0, "0 or more"),
            ("hello_timeout_s", self.hello_timeout_s > 0, "more than 0"),
            ("ping_interval_s", self.ping_interval_s > 0, "more than 0"),
            ("idle_timeout_s", self.idle_timeout_s > 0, "more than 0"),
            ("header_timeout_s", self.header_timeout_s > 0, "more than 0"),
            ("session_bytes", self.session_bytes >= 1, "at least 1"),
            ("sessions_bytes", self.sessions_bytes >= 1, "at least 1"),
        )
        check_limits("server limits", self, ranges)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of one HTTP request: its body may have ``body_bytes`` and must come within ``body_timeout_s``; its
    prompt may have ``prompt_tokens`` (None: what the model takes), and it may ask for ``max_n`` answers. The
    bodies of all requests that are being answered may have ``bodies_bytes`` together. ``stream_keepalive_s``:
    a stream in which nothing has been sent for so long is sent what clients skip."""

    body_bytes: int = 16_000_000
    body_timeout_s: float = 30.0
    prompt_tokens: int | None = None
    max_n: int = 128
    bodies_bytes: int = 256_000_000
    stream_keepalive_s: float = 10.0

    def __post_init__(self) -> None:
        ranges = (
            ("body_bytes", self.body_bytes >= 1, "at least 1"),
            ("body_timeout_s", self.body_timeout_s > 0, "more than 0"),
            ("prompt_tokens", self.prompt_tokens is None or self.prompt_tokens >= 1, "at least 1"),
            ("max_n", self.max_n >= 1, "at least 1"),
            ("bodies_bytes", self.bodies_bytes >= 1, "at least 1"),
            ("stream_keepalive_s", self.stream_keepalive_s > 0, "more than 0"),
        )
        check_limits("HTTP limits", self, ranges)
