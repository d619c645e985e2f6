"""Makes HTTP requests fail, per cause in docs/reference/errors.md. ``None``: this API has no such error."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import httpx2
from support.api_errors import (
    Response,
    connection_with,
    gated,
    request_bytes,
    request_fields,
    response_to,
    response_to_bytes,
)
from support.api_server import MODEL, ApiServer, api_server
from support.chat_template_shapes import INST
from support.docs.connection_refusals import (
    a_long_url,
    a_websocket_with_a_body,
    large_headers,
    no_http,
    no_request,
    not_read,
    slow_headers,
    the_sessions_path,
    too_many_connections,
    too_many_of_one_address,
)
from support.fake_engine import FakeEngine
from support.faulty_servers import (
    BEARER,
    KEY,
    BrokenTenants,
    changed,
    failing_engine,
    limited,
    of_any_address,
    small_bodies,
    tenants,
)
from support.server.apis import CHAT, MESSAGES, Api

from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.text import chat_layout
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.protocol.json_bounds import BODY_BOUNDS, OBJECT_BOUNDS
from agentflow.server.config.limits import HttpLimits
from agentflow.server.http.call import SMALL_BODY_BYTES

Refused = Callable[[ApiServer, Api], Response | None]
# A chat template that writes each content in its own way.
LOUD = "{% for message in messages %}[{{ message.content | upper }}]{% endfor %}"
# After 201 letters, each can be read in more ways than the one before. A grammar that shows this earlier is
# rejected when it is compiled.
AMBIGUOUS = 'start: /[a-z]{201}/ e\ne: e e e e | f\nf: e e e | g\ng: e e | /[a-z]/ | e "a" | "b" e'


def asking(**fields: Any) -> Refused:
    """The same body in both APIs."""
    return lambda server, api: response_to(server, api, request_fields(**fields))


def each(openai: dict[str, Any] | None, anthropic: dict[str, Any] | None) -> Refused:
    """A body in each API."""

    def refused(server: ApiServer, api: Api) -> Response | None:
        fields = openai if api is CHAT else anthropic
        return None if fields is None else response_to(server, api, request_fields(**fields))

    return refused


def of_prompt(prompt: Any) -> Refused:
    """A prompt of OpenAI's older API."""

    def refused(server: ApiServer, api: Api) -> Response | None:
        body = request_fields(messages=None, prompt=prompt)
        return response_to(server, api, body, path="/v1/completions") if api is CHAT else None

    return refused


def suffix(server: ApiServer, api: Api) -> Response | None:
    if api is MESSAGES:
        return None
    body = request_fields(messages=None, prompt="x", suffix=".")
    return response_to(server, api, body, path="/v1/completions")


def with_key(key: str | None) -> Refused:
    """What comes with a wrong key, or none."""

    def refused(_: ApiServer, api: Api) -> Response:
        with api_server(tenants=tenants(), constraints=False) as server:
            return response_to(
                server, api, request_fields(), headers={"Authorization": f"Bearer {key}"} if key else {}
            )

    return refused


def many_wrong_keys(_: ApiServer, api: Api) -> Response:
    wrong = {"Authorization": "Bearer af-other"}
    with of_any_address(), api_server(tenants=tenants(), constraints=False) as server:
        response_to(server, api, request_fields(), headers=wrong)
        return response_to(server, api, request_fields(), headers=BEARER)


def on_template(source: str | None, *roles: str) -> Refused:
    """A conversation, and a model with this chat template."""

    def refused(_: ApiServer, api: Api) -> Response:
        turns = [{"role": role, "content": "some words"} for role in roles]
        with api_server(template=ChatTemplate(source), constraints=False) as server:
            return response_to(server, api, request_fields(messages=turns))

    return refused


def many_renderings(server: ApiServer, api: Api) -> Response:
    with patch.object(chat_layout, "MIN_RENDERINGS", 4), patch.object(chat_layout, "MAX_RENDERED_CHARS", 0):
        return on_template(LOUD, *["user", "assistant"] * 3, "user")(server, api)


def a_model_that_is_not_mine(server: ApiServer, api: Api) -> Response:
    unknown = response_to(server, api, request_fields(model="nowhere"))
    with api_server(tenants=tenants('models = ["another"]'), constraints=False) as limited:
        assert response_to(limited, api, request_fields(), headers=BEARER) == unknown
    return unknown


def an_image(server: ApiServer, api: Api) -> Response:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    part = url if api is CHAT else {"type": "image", "source": source}
    return response_to(server, api, request_fields(messages=[{"role": "user", "content": [part]}]))


def constrained(api: Api, schema: dict[str, Any]) -> dict[str, Any]:
    """A request whose answer has a schema."""
    if api is CHAT:
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        return request_fields(response_format=named)
    return request_fields(output_config={"format": {"type": "json_schema", "schema": schema}})


def with_schema(schema: dict[str, Any]) -> Refused:
    return lambda server, api: response_to(server, api, constrained(api, schema))


def an_ambiguous_grammar(server: ApiServer, api: Api) -> Response | None:
    if api is MESSAGES:
        return None
    return response_to(server, api, request_fields(grammar=AMBIGUOUS, stream=True, max_tokens=900))


def no_compiler(_: ApiServer, api: Api) -> Response:
    with api_server(constraints=False) as server:
        return response_to(server, api, constrained(api, {"type": "integer"}))


def a_large_constraint(_: ApiServer, api: Api) -> Response:
    with api_server(compile_limits=CompileLimits(compiled_bytes=1)) as server:
        return response_to(server, api, constrained(api, {"type": "integer"}))


def a_deep_tool(server: ApiServer, api: Api) -> Response:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    return response_to(server, api, with_tool(api, deep))


def with_tool(api: Api, schema: dict[str, Any]) -> dict[str, Any]:
    if api is CHAT:
        return request_fields(
            tools=[{"type": "function", "function": {"name": "find", "parameters": schema}}]
        )
    return request_fields(tools=[{"name": "find", "input_schema": {"type": "object"} | schema}])


def many_constraints(_: ApiServer, api: Api) -> Response:
    with api_server(compile_limits=CompileLimits(max_waiting_per_tenant=1)) as server:
        compiler: Any = server.service.models._compiler
        server.wait_until(lambda: compiler.pid is not None)
        os.kill(compiler.pid, signal.SIGSTOP)  # nothing is compiled any more
        with contextlib.ExitStack() as stack:
            for number in range(2):  # one may be taken out of the queue
                body = constrained(api, {"const": number})
                stack.enter_context(connection_with(server, request_bytes(api, body)))
                server.wait_until(lambda n=number: len(compiler._jobs) > n or len(compiler._queue) == 1)
            return response_to(server, api, constrained(api, {"const": 2}))


def a_starved_constraint(_: ApiServer, api: Api) -> Response:
    with api_server(compile_limits=CompileLimits(wall_s=0.3)) as server:
        compiler: Any = server.service.models._compiler
        server.wait_until(lambda: compiler.pid is not None)
        os.kill(compiler.pid, signal.SIGSTOP)  # it gets no processor
        return response_to(server, api, constrained(api, {"const": 1}))


def many_values(server: ApiServer, api: Api) -> Response:
    return response_to(server, api, request_fields(metadata=[0] * (BODY_BOUNDS.values + 1)))


def a_large_tool(server: ApiServer, api: Api) -> Response:
    return response_to(server, api, with_tool(api, {"enum": [""] * OBJECT_BOUNDS.parts}))


def a_large_body(_: ApiServer, api: Api) -> Response:
    with small_bodies() as server:
        reported = response_to(
            server, api, request_fields(messages=[{"role": "user", "content": "x" * 1000}])
        )
        chunk = b"12c\r\n" + b"x" * 300 + b"\r\n"
        head = f"POST {api.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        assert (
            response_to_bytes(server, api, head + 2 * chunk) == reported
        )  # the same without a declared length
        return reported


def large_bodies(_: ApiServer, api: Api) -> Response:
    """Two that come at once, each small enough."""
    body = request_bytes(
        api, request_fields(messages=[{"role": "user", "content": "x" * (SMALL_BODY_BYTES + 1000)}])
    )
    with (
        api_server(limits=HttpLimits(bodies_bytes=2000), constraints=False) as server,
        connection_with(server, body[:-1]),
    ):
        server.wait_until(lambda: server.service.bodies.num_bytes >= 1000)
        return response_to_bytes(server, api, body)


def a_slow_body(_: ApiServer, api: Api) -> Response:
    with small_bodies() as server:
        return response_to_bytes(server, api, request_bytes(api, request_fields())[:-1])


def a_compressed_body(server: ApiServer, api: Api) -> Response:
    return response_to(server, api, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})


def a_prompt_over_the_limit(server: ApiServer, api: Api) -> Response:
    long = response_to(server, api, request_fields(messages=[{"role": "user", "content": "x" * 5000}]))
    with api_server(limits=HttpLimits(max_prompt_tokens=3), constraints=False) as limited:
        assert response_to(limited, api, request_fields()) == long
    return long


def used_up(setting: str) -> Refused:
    """By a first request."""

    def refused(_: ApiServer, api: Api) -> Response:
        with limited(setting) as server:
            with contextlib.suppress(KeyError):  # it is no refusal
                response_to(server, api, request_fields(), headers=BEARER)
            return response_to(server, api, request_fields(), headers=BEARER)

    return refused


def too_many_of_one_tenant(_: ApiServer, api: Api) -> Response:
    with limited("max_unfinished = 1") as server, gated(server, api, 1, f"x-api-key: {KEY}"):
        return response_to(server, api, request_fields(), headers=BEARER)


def too_many_in_background(_: ApiServer, api: Api) -> Response | None:
    if api is MESSAGES:
        return None
    body = {"model": MODEL, "input": "Hello", "background": True}
    with api_server(limits=HttpLimits(max_background_responses=1), constraints=False) as server:
        server.call(server.engine.gate.allow, 0)
        with httpx2.Client(base_url=server.url) as client:
            begun = client.post("/v1/responses", json=body).json()["id"]
            full = response_to(server, api, body, path="/v1/responses")
            assert client.delete(f"/v1/responses/{begun}").status_code == 200
    return full


def an_unknown_response(server: ApiServer, api: Api) -> Response | None:
    return response_to(server, api, method="GET", path="/v1/responses/resp_1") if api is CHAT else None


def an_unknown_conversation(server: ApiServer, api: Api) -> Response | None:
    if api is MESSAGES:
        return None
    unknown = response_to(server, api, method="GET", path="/v1/conversations/conv_1")
    body = {"model": MODEL, "input": "Hello", "conversation": "conv_1"}
    assert response_to(server, api, body, path="/v1/responses") == unknown
    return unknown


def a_long_wait(_: ApiServer, api: Api) -> Response:
    engine = FakeEngine(max_running=1)
    with api_server(engine, max_wait_s=1e-9, constraints=False) as server, gated(server, api, 2):
        return response_to(server, api, request_fields())


def a_full_engine(_: ApiServer, api: Api) -> Response:
    engine = FakeEngine(max_unfinished=1)
    with api_server(engine, constraints=False) as server, gated(server, api):
        full = response_to(server, api, request_fields())
    engine = FakeEngine(max_unfinished=2)
    with (
        api_server(engine, tenants=tenants(), constraints=False) as server,
        gated(server, api, 1, f"x-api-key: {KEY}"),  # the other one is for other tenants
    ):
        assert response_to(server, api, request_fields(), headers=BEARER) == full
    return full


def an_ending_server(server: ApiServer, api: Api) -> Response:
    with changed(server, server.service, "is_draining", True):
        ending = response_to(server, api, request_fields())
    with changed(server, server._server.app.state, "service", None):
        assert response_to(server, api, request_fields()) == ending  # before there are models
    return ending


def a_failed_step(_: ApiServer, api: Api) -> Response:
    with api_server(failing_engine(ArithmeticError("no memory")), constraints=False) as server:
        return response_to(server, api, request_fields())


def a_dead_engine(_: ApiServer, api: Api) -> Response:
    with api_server(failing_engine(SystemExit(3)), constraints=False) as server:
        dying = response_to(server, api, request_fields())
        assert response_to(server, api, request_fields()) == dying
        return dying


def a_failed_step_in_a_stream(_: ApiServer, api: Api) -> Response:
    with api_server(failing_engine(ArithmeticError("no memory"), 3), constraints=False) as server:
        return response_to(server, api, request_fields(stream=True, max_tokens=100))


def a_fault_of_the_server(_: ApiServer, api: Api) -> Response:
    with api_server(tenants=BrokenTenants(), constraints=False) as server:
        return response_to(server, api, request_fields())


def a_page_of_another_site(server: ApiServer, api: Api) -> Response:
    return response_to(server, api, request_fields(), headers={"Origin": "http://elsewhere.example"})


def another_host(_: ApiServer, api: Api) -> Response:
    with api_server(hosts=("127.0.0.1",), constraints=False) as server:
        return response_to(server, api, request_fields(), headers={"Host": "elsewhere.example"})


REFUSED: dict[str, Refused] = {
    "missing_key": with_key(None),
    "unknown_key": with_key("af-other"),
    "too_many_wrong_keys": many_wrong_keys,
    "unknown_model": a_model_that_is_not_mine,
    "unknown_response": an_unknown_response,
    "unknown_conversation": an_unknown_conversation,
    "unknown_path": lambda server, api: response_to(server, api, method="GET", path=api.path + "/nowhere"),
    "wrong_method": lambda server, api: response_to(server, api, method="PUT"),
    "websocket_required": the_sessions_path,
    "websocket_with_body": a_websocket_with_a_body,
    "not_json": lambda server, api: response_to(server, api, b"{"),
    "compressed_body": a_compressed_body,
    "missing_field": asking(messages=None),
    "wrong_type": asking(max_tokens="many"),
    "unknown_field": asking(wishes="many"),
    "out_of_range": asking(top_p=-1),
    "conflicting_values": each({"top_logprobs": 2}, {"tool_choice": {"type": "tool", "name": "unknown"}}),
    "unsupported_parameter": each({"store": True}, {"container": "c_1"}),
    "unsupported_completion_parameter": suffix,
    "thread": each(None, {"thread": {"type": "create"}}),
    "unsupported_content": an_image,
    "no_chat_template": on_template(None, "user"),
    "turns_rejected": on_template(INST, "assistant", "user"),
    "too_many_rewritten_turns": many_renderings,
    "prompt_too_long": a_prompt_over_the_limit,
    "empty_prompt": of_prompt(""),
    "unknown_token": of_prompt([10**6]),
    "invalid_constraint": with_schema({"type": "string", "pattern": "a("}),
    "unsupported_constraint": with_schema({"$dynamicRef": "#a"}),
    "constraint_too_large": a_large_constraint,
    "constraint_too_expensive_in_stream": an_ambiguous_grammar,
    "tool_too_deep": a_deep_tool,
    "constraints_unsupported": no_compiler,
    "too_many_constraints": many_constraints,
    "constraint_not_compiled_in_time": a_starved_constraint,
    "tool_too_large": a_large_tool,
    "too_many_values": many_values,
    "body_too_large": a_large_body,
    "bodies_too_large": large_bodies,
    "slow_body": a_slow_body,
    "requests_per_minute": used_up("requests_per_minute = 1"),
    "tokens_per_minute": used_up("tokens_per_minute = 1"),
    "too_many_unfinished": too_many_of_one_tenant,
    "too_many_in_background": too_many_in_background,
    "long_wait": a_long_wait,
    "engine_full": a_full_engine,
    "not_ready": an_ending_server,
    "engine_failed": a_failed_step,
    "engine_down": a_dead_engine,
    "engine_failed_in_stream": a_failed_step_in_a_stream,
    "internal_error": a_fault_of_the_server,
    "forbidden_origin": a_page_of_another_site,
    "unknown_host": another_host,
    "too_many_connections": too_many_connections,
    "too_many_connections_per_address": too_many_of_one_address,
    "no_request": no_request,
    "slow_headers": slow_headers,
    "large_headers": large_headers,
    "long_url": a_long_url,
    "answer_not_read": not_read,
    "not_http": no_http,
}
APIS = (CHAT, MESSAGES)
