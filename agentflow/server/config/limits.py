"""The limits that a server applies to its clients.

``server/config/schema.py`` derives the settings of the table ``[limits]`` from these structs.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agentflow.protocol.wire import MAX_FRAME_BYTES
from agentflow.runtime.declared import Count, Declared, Seconds, SecondsOrZero, doc
from agentflow.runtime.programs.store import ProgramLimits

# A Welcome and the longest error must fit into a frame.
MIN_FRAME_BYTES = 4096


class HttpLimits(Declared, frozen=True, kw_only=True):
    """Limits of the HTTP APIs."""

    body_bytes: Annotated[Count, doc("size of one HTTP request's body")] = 16_000_000
    bodies_bytes: Annotated[Count, doc("total size of the bodies of all HTTP requests in progress")] = (
        256_000_000
    )
    body_timeout_s: Annotated[Seconds, doc("time for a request's body to arrive")] = 30.0
    max_prompt_tokens: Annotated[
        Count | None, doc("prompt tokens of one HTTP request (not set: the model's context)")
    ] = None
    max_n: Annotated[Count, doc("answers to one HTTP request (its `n`)")] = 128
    responses_bytes: Annotated[
        Count, doc("memory for stored responses of `/v1/responses`; the oldest are dropped")
    ] = 256_000_000
    response_lifetime_s: Annotated[Seconds, doc("time for which a response is stored")] = 86_400.0
    max_background_responses: Annotated[
        Count, doc("responses of one tenant that run in the background concurrently")
    ] = 64
    max_programs: Annotated[Count, doc("open programs of one tenant (`/v1/programs`)")] = 256
    program_bytes: Annotated[Count, doc("memory for the requests and values of one program")] = 64_000_000
    programs_bytes: Annotated[Count, doc("memory for the programs of all sessions")] = 1_000_000_000
    program_idle_s: Annotated[Seconds, doc("time after its last use until a program is closed")] = 3_600.0
    max_embedding_inputs: Annotated[Count, doc("inputs of one request for embeddings")] = 2048
    max_embedding_tokens: Annotated[
        Count, doc("tokens of one request for embeddings, all inputs together")
    ] = 300_000
    stream_keepalive_s: Annotated[
        Seconds, doc("interval of keep-alive events in a stream that is otherwise silent")
    ] = 10.0

    @property
    def programs(self) -> ProgramLimits:
        """The limits of programs."""
        return ProgramLimits(self.max_programs, self.program_bytes, self.programs_bytes, self.program_idle_s)


class ServerLimits(Declared, frozen=True, kw_only=True):
    """Limits of connections and sessions.

    For limits by address, an address is an IPv4 address or an IPv6 network of 64 bits; this machine is
    exempt. A client that has not answered a ping within another ``ping_interval_s`` is disconnected. The
    memory of a session is an estimate for its ops, states and values. Half of ``sessions_bytes`` is divided
    equally between the ``max_sessions`` sessions, and this part is always available to a session.
    """

    frame_bytes: Annotated[
        int, Meta(ge=MIN_FRAME_BYTES), doc("size of one websocket message, in either direction")
    ] = MAX_FRAME_BYTES
    max_connections: Annotated[
        Count, doc("open websockets; HTTP and websockets together: twice as many connections")
    ] = 2_000
    max_connections_per_address: Annotated[
        Count, doc("connections of both kinds from one address other than this machine")
    ] = 512
    max_sessions: Annotated[
        Count, doc("open websocket sessions, including sessions that wait to be resumed")
    ] = 1_000
    session_bytes: Annotated[Count, doc("memory for the ops, states and values of one session")] = 256_000_000
    sessions_bytes: Annotated[Count, doc("memory for all sessions together")] = 2_000_000_000
    resume_grace_s: Annotated[SecondsOrZero, doc("time in which a lost session can be resumed")] = 10.0
    hello_timeout_s: Annotated[Seconds, doc("time for a new websocket to send its first frame")] = 10.0
    ping_interval_s: Annotated[Seconds, doc("interval of pings on silent websockets")] = 20.0
    idle_timeout_s: Annotated[
        Seconds, doc("time until the next request on an open connection; set it above a proxy's")
    ] = 75.0
    header_timeout_s: Annotated[Seconds, doc("time for a request's headers to arrive")] = 20.0
