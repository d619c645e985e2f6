"""Makes single ops fail, per cause in docs/reference/errors.md. Returns the code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from support.api_errors import gated
from support.api_server import VENDOR, ApiServer, api_server
from support.apis import openai_answers
from support.chat_template_shapes import INST
from support.docs.http_refusals import LOUD, Opened, another, vendor_that_sends
from support.fake_engine import FakeEngine
from support.faulty_servers import KEY, failing_engine, spent, tenants
from support.server.apis import CHAT
from support.session_errors import ASK, OPEN, Session, gen, text
from support.session_errors import session as session_on

from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.text import chat_layout
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.protocol.text import stop_pattern
from agentflow.runtime.interpreter import interpreter, state_tree
from agentflow.server.config.limits import ServerLimits
from agentflow.server.tenants.rate_limit import TenantGate

Fails = Callable[[ApiServer], str]


def ops(*sent: dict[str, Any], state: int | None = None, on: Opened | None = None) -> Fails:
    """The error of the first variable (or of this state). ``on``: opens another server."""

    def fail(server: ApiServer) -> str:
        with (
            contextlib.nullcontext(server) if on is None else on() as asked,
            session_on(asked) as session,
        ):
            session.ops(*sent)
            return session.failure(state)

    return fail


def busy(**config: Any) -> Opened:
    """Opens a server whose engine runs a request and does not get on."""

    @contextmanager
    def opened() -> Iterator[ApiServer]:
        with api_server(FakeEngine(**config), constraints=False) as server, gated(server, CHAT):
            yield server

    return opened


def failing(error: BaseException) -> Opened:
    return lambda: api_server(failing_engine(error), constraints=False)


def patched(module: Any, name: str, value: float, fail: Fails) -> Fails:
    def patched_fail(server: ApiServer) -> str:
        with patch.object(module, name, value):
            return fail(server)

    return patched_fail


def large_values(server: ApiServer) -> str:
    """A large op; and small ones, of which the second takes the value of the first sixty times."""
    longer = {**SET, "parts": [{"op": "ref", "var": 2}] * 60}
    values = (OPEN, {**SET, "var": 2, "parts": ["x" * 4000]}, longer)
    causes: list[tuple[ServerLimits, tuple[dict[str, Any], ...]]] = [
        (ServerLimits(session_bytes=200_000), values),
        (ServerLimits(sessions_bytes=200_000), values),
        (ServerLimits(session_bytes=20_000), (OPEN, text("x" * 30_000))),
    ]
    [code] = {ops(*sent, state=1, on=another(server_limits=limits))(server) for limits, sent in causes}
    return code


def on_template(source: str | None) -> Opened:
    return another(template=ChatTemplate(source))


def many_renderings(server: ApiServer) -> str:
    turns = [op for role in ["user", "assistant"] * 3 for op in turn(role)]
    with patch.object(chat_layout, "MIN_RENDERINGS", 4), patch.object(chat_layout, "MAX_RENDERED_CHARS", 0):
        return ops(OPEN, *turns, gen(), on=on_template(LOUD))(server)


@contextmanager
def session_of_ann(*settings: str) -> Iterator[tuple[ApiServer, Session]]:
    """A session of a tenant with these settings."""
    known = tenants(*settings)
    gate = TenantGate(current=known.current)
    with (
        api_server(tenants=known, gate=gate, constraints=False) as server,
        session_on(server, key=KEY) as session,
    ):
        yield server, session


def used_up(setting: str) -> Fails:
    def fail(_: ApiServer) -> str:
        with session_of_ann(setting) as (_, session):
            session.ops(*ASK, gen(var=2), gen(var=3))
            return session.failure()

    return fail


def used_up_costs(_: ApiServer) -> str:
    with spent() as server, session_on(server, key=KEY) as session:
        session.ops({**OPEN, "model": VENDOR}, *ASKED, gen())
        return session.failure()


def an_invalid_answer(_: ApiServer) -> str:
    answer = openai_answers.text_stream("no number")
    with vendor_that_sends(answer) as server, session_on(server) as session:
        session.ops({**OPEN, "model": VENDOR}, *ASKED, constrained("schema", '{"type": "integer"}'))
        return session.failure()


def too_many_of_one_tenant(_: ApiServer) -> str:
    with (
        session_of_ann("max_unfinished = 1") as (server, session),
        gated(server, CHAT, 1, f"x-api-key: {KEY}"),
    ):
        session.ops(*ASK, gen())
        return session.failure()


def a_key_that_is_gone(_: ApiServer) -> str:
    with session_of_ann() as (server, session):
        known = server.service.tenants._known
        server.call(known.by_hash.clear)
        server.call(known.by_name.clear)
        session.ops(*ASK, gen())
        return session.failure()


def no_counters(_: ApiServer) -> str:
    with (
        api_server(failing_engine(SystemExit(3)), constraints=False) as server,
        session_on(server) as session,
    ):
        session.ops(*ASK, gen())
        assert session.failure() == "`engine_down`"
        session.ops({"op": "getstats", "ticket": 7})
        reply = next(event for event in session.events() if event["event"] == "statsreply")
        session.check_goes_on(98)
        return f"`{reply['error']['code']}`"


def a_cancelled_state(server: ApiServer) -> str:
    with session_on(server) as session:
        server.call(server.engine.gate.allow, 0)
        try:
            session.ops(*ASK, gen())
            server.call(server.engine.gate.held)
            session.ops({"op": "cancel", "state": 1})
            return session.failure()
        finally:
            server.call(server.engine.gate.open)


def turn(role: str) -> tuple[dict[str, Any], ...]:
    begin = {"op": "begin", "state": 1, "role": role}
    return begin, text("some words"), {"op": "end", "state": 1}


def constrained(kind: str, source: str) -> dict[str, Any]:
    return gen(constraint={"kind": kind, "source": source})


ASKED = (*turn("user"), {"op": "begin", "state": 1, "role": "assistant"})
SET = {"op": "set", "state": 1, "var": 3, "name": "text", "parts": ["no JSON"]}
IN_JSON = {"op": "ref", "var": 3, "transforms": [["json", "score"]]}
IMAGE = {"op": "image", "state": 1, "source": "https://example.com/a.png"}
USER = {"op": "begin", "state": 1, "role": "user"}
FORK = {"op": "fork", "state": 1, "children": [11, 12]}
TASK_GROUP = {"op": "taskgroup", "state": 1, "children": [11, 12]}
NO_TOKENS = gen(state=11, params={"max_tokens": 0})
SELECT = {"op": "select", "state": 1, "var": 2, "name": "choice", "choices": []}
SEAL = {"op": "seal", "state": 1}
TWO_TOKENS = {"op": "limit", "state": 1, "output_tokens": 2}


TWICE = (OPEN, {"op": "open", "state": 3}, {"op": "open", "state": 3})
TRANSFORMED = {"op": "ref", "var": 2, "transforms": [["strip", ""]] * 100}


FAILURES: dict[str, Fails] = {
    "unreadable_op": ops(*ASK, {"op": "begin", "state": 1, "role": "judge"}, state=1),
    "unknown_parameter": ops(*ASK, gen(params={"heat": 1})),
    "out_of_range": ops(*ASK, gen(params={"max_tokens": 0})),
    "unknown_token": ops(*ASK, gen(params={"logit_bias": [[10**6, 1.0]]})),
    "empty_state": ops(OPEN, gen()),
    "no_choices": ops(*ASK, SELECT),
    "nested_turn": ops(OPEN, USER, USER, state=1),
    "invalid_hint": ops(OPEN, {"op": "hint", "state": 1, "forks": -5}, state=1),
    "unknown_variable": ops(OPEN, text({"op": "ref", "var": 7}), state=1),
    "duplicate_number": ops(*TWICE, state=3),
    "too_many_transforms": ops(OPEN, {**SET, "var": 2}, text(TRANSFORMED), state=1),
    "invalid_limit": ops(OPEN, {"op": "limit", "state": 1, "output_tokens": -1}, state=1),
    "invalid_taskgroup": ops(*TWICE[:2], {"op": "taskgroup", "state": 1, "children": [3]}, state=1),
    "long_name": ops({**OPEN, "cache_salt": "x" * 257}, state=1),
    "invalid_graph": ops({"op": "submit", "state": 1, "ops": []}, state=1),
    "no_chat_template": ops(OPEN, *turn("user"), state=1, on=on_template(None)),
    "turns_rejected": ops(OPEN, *turn("assistant"), gen(), on=on_template(INST)),
    "too_many_rewritten_turns": many_renderings,
    "unsupported_image": ops(OPEN, IMAGE, state=1),
    "prompt_too_long": ops(OPEN, text("x" * 5000), gen()),
    "invalid_constraint": ops(*ASK, constrained("regex", "a(")),
    "constraint_too_large": ops(
        *ASK,
        constrained("regex", "a+"),
        on=another(constraints=True, compile_limits=CompileLimits(compiled_bytes=1)),
    ),
    "stop_regex_too_slow": patched(
        stop_pattern, "BURST_S", 1e-9, ops(*ASK, gen(params={"stop_regex": "a+b"}))
    ),
    "constraints_unsupported": ops(*ASK, constrained("regex", "a"), on=another()),
    "unknown_model": ops({**OPEN, "model": "nowhere"}, state=1),
    "sealed_state": ops(*ASK, SEAL, gen()),
    "deadline_exceeded": ops(*ASK, {"op": "limit", "state": 1, "deadline_s": 0.01}, gen(), on=busy()),
    "budget_exceeded": ops(*ASK, TWO_TOKENS, gen()),
    "cancelled": a_cancelled_state,
    "transform_failed": ops(*ASK, SET, text(IN_JSON), state=1),
    "dependency_failed": ops(*ASK, {**OPEN, "state": 11}, NO_TOKENS, text({"op": "ref", "var": 2}), state=1),
    "branch_failed": ops(*ASK, FORK, TASK_GROUP, NO_TOKENS, state=1),
    "invalid_answer": an_invalid_answer,
    "requests_per_minute": used_up("requests_per_minute = 1"),
    "tokens_per_minute": used_up("tokens_per_minute = 1"),
    "max_cost_per_day": used_up_costs,
    "too_many_unfinished": too_many_of_one_tenant,
    "revoked_key": a_key_that_is_gone,
    "engine_full": ops(*ASK, gen(), on=busy(max_unfinished=1)),
    "too_many_states": patched(state_tree, "MAX_STATES", 1, ops(*TWICE[:2], state=3)),
    "too_many_limits": patched(state_tree, "MAX_LIMITS", 0, ops(OPEN, TWO_TOKENS, state=1)),
    "too_many_pending_ops": patched(interpreter, "MAX_PENDING_OPS", 1, ops(*ASK, gen())),
    "session_too_large": large_values,
    "engine_failed": ops(*ASK, gen(), on=failing(ArithmeticError("no memory"))),
    "engine_down": ops(*ASK, gen(), on=failing(SystemExit(3))),
    "stats_engine_down": no_counters,
}
