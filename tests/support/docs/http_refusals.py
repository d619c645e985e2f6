"""Makes HTTP requests fail, per cause in docs/reference/errors.md. ``None``: this API has no such error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import httpx2
from anyio.from_thread import start_blocking_portal
from support.api_errors import (
    Response,
    connection_with,
    gated,
    request_bytes,
    request_fields,
    response_to,
    response_to_bytes,
)
from support.api_server import MODEL, VENDOR, ApiServer, api_server
from support.apis import openai_answers
from support.apis.fake_server import Answer, fake_server
from support.chat_template_shapes import INST
from support.docs.connection_refusals import (
    a_long_url,
    a_websocket_with_a_body,
    large_headers,
    no_http,
    no_request,
    not_read,
    slow_headers,
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
    spent,
    tenants,
)
from support.server.apis import CHAT, MESSAGES, Api

from agentflow.backends.apis.openai import OpenAI
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.text import chat_layout
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.protocol.bounds.json_bounds import BODY_BOUNDS, OBJECT_BOUNDS
from agentflow.server.config.limits import HttpLimits
from agentflow.server.http.json_body import SMALL_BODY_BYTES

Refused = Callable[[ApiServer, Api], Response | None]
Opened = Callable[[], AbstractContextManager[ApiServer]]
NO_MEMORY = ArithmeticError("no memory")
# A chat template that writes each content in its own way.
LOUD = "{% for message in messages %}[{{ message.content | upper }}]{% endfor %}"
# After 201 letters, each can be read in more ways than the one before. A grammar that shows this earlier is
# rejected when it is compiled.
AMBIGUOUS = 'start: /[a-z]{201}/ e\ne: e e e e | f\nf: e e e | g\ng: e e | /[a-z]/ | e "a" | "b" e'


Body = Callable[[Api], Any]


def sending(body: Body | None = None, *, on: Opened | None = None, **options: Any) -> Refused:
    """Sends the body of each API, by default a short request. ``on``: opens another server. ``options``: of
    ``response_to``."""

    def refused(server: ApiServer, api: Api) -> Response:
        with contextlib.nullcontext(server) if on is None else on() as asked:
            return response_to(asked, api, request_fields() if body is None else body(api), **options)

    return refused


def asking(**fields: Any) -> Refused:
    """The same body in both APIs."""
    return sending(lambda _: request_fields(**fields))


def only(api: Api, refused: Refused) -> Refused:
    """An error that the other API does not have."""
    return lambda server, asked: refused(server, api) if asked is api else None


def each(openai: dict[str, Any], anthropic: dict[str, Any]) -> Refused:
    """A body in each API."""
    return sending(lambda api: request_fields(**(openai if api is CHAT else anthropic)))


def of_prompt(**fields: Any) -> Refused:
    """A request of OpenAI's older API."""
    body = request_fields(messages=None, **fields)
    return only(CHAT, sending(lambda _: body, path="/v1/completions"))


def getting(path: str) -> Refused:
    return only(CHAT, sending(lambda _: None, method="GET", path=path))


def another(**options: Any) -> Opened:
    """Opens a server with these options, by default without a compiler of constraints."""
    return lambda: api_server(**{"constraints": False, **options})


def keyed(*settings: str) -> Opened:
    return another(tenants=tenants(*settings))


@contextmanager
def vendor_that_sends(answer: Answer) -> Iterator[ApiServer]:
    """A server whose model ``VENDOR`` is behind an API with this answer."""
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(fake_server(lambda request: answer)) as api,
        vendor_at(api.url) as server,
    ):
        yield server


def vendor_at(url: str) -> AbstractContextManager[ApiServer]:
    return api_server(vendor=OpenAI("gpt-4.1-mini", base_url=f"{url}/v1", api_key="k", max_retries=0))


def of_vendor(on: Opened) -> Refused:
    return sending(lambda _: request_fields(model=VENDOR), on=on)


def many_wrong_keys(_: ApiServer, api: Api) -> Response:
    wrong = {"Authorization": "Bearer af-other"}
    with of_any_address(), api_server(tenants=tenants(), constraints=False) as server:
        response_to(server, api, request_fields(), headers=wrong)
        return response_to(server, api, request_fields(), headers=BEARER)


def on_template(source: str | None, *roles: str) -> Refused:
    """A conversation, and a model with this chat template."""
    turns = [{"role": role, "content": "some words"} for role in roles]
    return sending(lambda _: request_fields(messages=turns), on=another(template=ChatTemplate(source)))


def many_renderings(server: ApiServer, api: Api) -> Response:
    with patch.object(chat_layout, "MIN_RENDERINGS", 4), patch.object(chat_layout, "MAX_RENDERED_CHARS", 0):
        return on_template(LOUD, *["user", "assistant"] * 3, "user")(server, api)


def a_model_that_is_not_mine(server: ApiServer, api: Api) -> Response:
    unknown = response_to(server, api, request_fields(model="nowhere"))
    with api_server(tenants=tenants('models = ["another"]'), constraints=False) as limited:
        assert response_to(limited, api, request_fields(), headers=BEARER) == unknown
    return unknown


def an_image(api: Api) -> dict[str, Any]:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    part = url if api is CHAT else {"type": "image", "source": source}
    return request_fields(messages=[{"role": "user", "content": [part]}])


def constrained(api: Api, schema: dict[str, Any]) -> dict[str, Any]:
    """A request whose answer has a schema."""
    if api is CHAT:
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        return request_fields(response_format=named)
    return request_fields(output_config={"format": {"type": "json_schema", "schema": schema}})


def with_schema(schema: dict[str, Any], on: Opened | None = None) -> Refused:
    return sending(lambda api: constrained(api, schema), on=on)


def with_tool(schema: dict[str, Any]) -> Refused:
    parameters = {"type": "object", **schema}
    return sending(lambda api: request_fields(tools=[api.tool(name="find", parameters=parameters)]))


def nested(levels: int) -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(levels):
        deep = {"properties": {"a": deep}}
    return deep


def _stopped_compiler(server: ApiServer) -> Any:
    """The server's compiler, whose process gets no processor. The compiler itself stops the process and lets
    it go on, so it must not do the latter."""
    compiler: Any = server.service.models._compiler
    server.wait_until(lambda: compiler.pid is not None)
    compiler._worker.go_on = lambda: None
    compiler._worker.pause()
    return compiler


def many_constraints(_: ApiServer, api: Api) -> Response:
    with api_server(compile_limits=CompileLimits(max_waiting_per_tenant=1)) as server:
        compiler = _stopped_compiler(server)
        with contextlib.ExitStack() as stack:
            for number in range(2):  # one may be taken out of the queue
                body = constrained(api, {"const": number})
                stack.enter_context(connection_with(server, request_bytes(api, body)))
                server.wait_until(lambda n=number: len(compiler._jobs) > n or len(compiler._queue) == 1)
            return response_to(server, api, constrained(api, {"const": 2}))


def a_starved_constraint(_: ApiServer, api: Api) -> Response:
    with api_server(compile_limits=CompileLimits(wall_s=0.3)) as server:
        _stopped_compiler(server)
        return response_to(server, api, constrained(api, {"const": 1}))


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
    """Two bodies at the same time, each small enough."""
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


def a_prompt_over_the_limit(server: ApiServer, api: Api) -> Response:
    long = response_to(server, api, request_fields(messages=[{"role": "user", "content": "x" * 5000}]))
    with api_server(limits=HttpLimits(max_prompt_tokens=3), constraints=False) as limited:
        assert response_to(limited, api, request_fields()) == long
    return long


def used_up(setting: str) -> Refused:
    """A first request uses up the limit."""

    def refused(_: ApiServer, api: Api) -> Response:
        with limited(setting) as server:
            with contextlib.suppress(KeyError):  # it is no refusal
                response_to(server, api, request_fields(), headers=BEARER)
            return response_to(server, api, request_fields(), headers=BEARER)

    return refused


def used_up_costs(_: ApiServer, api: Api) -> Response:
    with spent() as server:
        return response_to(server, api, request_fields(model=VENDOR), headers=BEARER)


def too_many_of_one_tenant(_: ApiServer, api: Api) -> Response:
    with limited("max_unfinished = 1") as server, gated(server, api, 1, f"x-api-key: {KEY}"):
        return response_to(server, api, request_fields(), headers=BEARER)


def too_many_in_background(_: ApiServer, api: Api) -> Response:
    body = {"model": MODEL, "input": "Hello", "background": True}
    with api_server(limits=HttpLimits(max_background_responses=1), constraints=False) as server:
        server.call(server.engine.gate.allow, 0)
        with httpx2.Client(base_url=server.url) as client:
            begun = client.post("/v1/responses", json=body).json()["id"]
            full = response_to(server, api, body, path="/v1/responses")
            assert client.delete(f"/v1/responses/{begun}").status_code == 200
    return full


def an_unknown_conversation(server: ApiServer, api: Api) -> Response:
    unknown = response_to(server, api, method="GET", path="/v1/conversations/conv_1")
    body = {"model": MODEL, "input": "Hello", "conversation": "conv_1"}
    assert response_to(server, api, body, path="/v1/responses") == unknown
    return unknown


def an_unknown_item(server: ApiServer, api: Api) -> Response:
    made = httpx2.post(f"{server.url}/v1/conversations", json={}).json()
    unknown = response_to(server, api, method="GET", path=f"/v1/conversations/{made['id']}/items/msg_1")
    body = {"model": MODEL, "input": [{"type": "item_reference", "id": "msg_1"}]}
    assert response_to(server, api, body, path="/v1/responses") == unknown
    return unknown


def of_program(refused: Callable[[ApiServer, Api, str], Response], **limits: Any) -> Refused:
    """An error of a new program, whose path ``refused`` is given."""

    def asked(_: ApiServer, api: Api) -> Response:
        with api_server(limits=HttpLimits(**limits), constraints=False) as server:
            created = httpx2.post(f"{server.url}/v1/programs", json={}).json()
            path = f"/v1/programs/{created['id']}"
            found = refused(server, api, path)
            assert httpx2.delete(server.url + path).status_code == 200
            return found

    return only(CHAT, asked)


def an_unknown_variable(server: ApiServer, api: Api, path: str) -> Response:
    return response_to(server, api, method="GET", path=f"{path}/variables/x")


def a_failed_variable(server: ApiServer, api: Api, path: str) -> Response:
    out = {"name": "out", "in_out": "out", "semantic_var_id": "x", "transforms": [["json", "none"]]}
    body = {"prompt": "A{{out}}", "placeholders": [out]}
    assert httpx2.post(f"{server.url}{path}/submit", json=body).status_code == 200
    return response_to(server, api, method="GET", path=f"{path}/variables/x")


def another_program(server: ApiServer, api: Api, path: str) -> Response:
    return response_to(server, api, {}, path="/v1/programs")


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


def a_dead_engine(_: ApiServer, api: Api) -> Response:
    with api_server(failing_engine(SystemExit(3)), constraints=False) as server:
        dying = response_to(server, api, request_fields())
        assert response_to(server, api, request_fields()) == dying
        return dying


def failing(after_steps: int = 0, **fields: Any) -> Refused:
    """A refusal by an engine whose step fails."""
    body = request_fields(**fields)
    return sending(lambda _: body, on=lambda: another(engine=failing_engine(NO_MEMORY, after_steps))())


REFUSED: dict[str, Refused] = {
    "missing_key": sending(on=keyed()),
    "unknown_key": sending(on=keyed(), headers={"Authorization": "Bearer af-other"}),
    "too_many_wrong_keys": many_wrong_keys,
    "unknown_model": a_model_that_is_not_mine,
    "unknown_response": getting("/v1/responses/resp_1"),
    "unknown_conversation": only(CHAT, an_unknown_conversation),
    "unknown_item": only(CHAT, an_unknown_item),
    "unknown_program": getting("/v1/programs/prog_1/variables/x"),
    "unknown_variable": of_program(an_unknown_variable),
    "failed_variable": of_program(a_failed_variable),
    "unknown_path": lambda server, api: response_to(server, api, method="GET", path=api.path + "/nowhere"),
    "wrong_method": sending(lambda _: None, method="PUT"),
    "websocket_required": getting("/v1/session"),
    "websocket_with_body": a_websocket_with_a_body,
    "not_json": sending(lambda _: b"{"),
    "compressed_body": sending(lambda _: b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    "missing_field": asking(messages=None),
    "wrong_type": asking(max_tokens="many"),
    "unknown_field": asking(wishes="many"),
    "out_of_range": asking(top_p=-1),
    "conflicting_values": each({"top_logprobs": 2}, {"tool_choice": {"type": "tool", "name": "unknown"}}),
    "unsupported_parameter": each({"store": True}, {"container": "c_1"}),
    "unsupported_completion_parameter": of_prompt(prompt="x", suffix="."),
    "thread": only(MESSAGES, asking(thread={"type": "create"})),
    "unsupported_content": sending(an_image),
    "no_chat_template": on_template(None, "user"),
    "turns_rejected": on_template(INST, "assistant", "user"),
    "too_many_rewritten_turns": many_renderings,
    "prompt_too_long": a_prompt_over_the_limit,
    "empty_prompt": of_prompt(prompt=""),
    "unknown_token": of_prompt(prompt=[10**6]),
    "invalid_constraint": with_schema({"type": "string", "pattern": "a("}),
    "unsupported_constraint": with_schema({"$dynamicRef": "#a"}),
    "constraint_too_large": with_schema(
        {"type": "integer"}, another(constraints=True, compile_limits=CompileLimits(compiled_bytes=1))
    ),
    "constraint_too_expensive_in_stream": only(CHAT, asking(grammar=AMBIGUOUS, stream=True, max_tokens=900)),
    "tool_too_deep": with_tool(nested(300)),
    "constraints_unsupported": with_schema({"type": "integer"}, another()),
    "too_many_constraints": many_constraints,
    "constraint_not_compiled_in_time": a_starved_constraint,
    "tool_too_large": with_tool({"enum": [""] * OBJECT_BOUNDS.parts}),
    "too_many_values": asking(metadata=[0] * (BODY_BOUNDS.values + 1)),
    "body_too_large": a_large_body,
    "bodies_too_large": large_bodies,
    "slow_body": a_slow_body,
    "requests_per_minute": used_up("requests_per_minute = 1"),
    "tokens_per_minute": used_up("tokens_per_minute = 1"),
    "max_cost_per_day": used_up_costs,
    "too_many_unfinished": too_many_of_one_tenant,
    "too_many_in_background": only(CHAT, too_many_in_background),
    "program_limit": of_program(another_program, max_programs=1),
    "long_wait": a_long_wait,
    "engine_full": a_full_engine,
    "not_ready": an_ending_server,
    "engine_failed": failing(),
    "engine_down": a_dead_engine,
    "engine_failed_in_stream": failing(3, stream=True, max_tokens=100),
    "internal_error": sending(on=another(tenants=BrokenTenants())),
    "api_failed": of_vendor(lambda: vendor_that_sends(openai_answers.error(401, "no"))),
    "api_unreachable": of_vendor(lambda: vendor_at("http://127.0.0.1:1")),
    "api_overloaded": of_vendor(lambda: vendor_that_sends(openai_answers.error(429, "no"))),
    "api_refused": of_vendor(lambda: vendor_that_sends(openai_answers.error(400, "no"))),
    "forbidden_origin": sending(headers={"Origin": "http://elsewhere.example"}),
    "unknown_host": sending(on=another(hosts=("127.0.0.1",)), headers={"Host": "elsewhere.example"}),
    "adapters_forbidden": only(
        CHAT, sending(lambda _: {"lora_name": "a", "lora_path": "a"}, path="/v1/load_lora_adapter")
    ),
    "replicas_forbidden": only(
        CHAT, sending(lambda _: None, on=keyed(), method="GET", path="/v1/replicas", headers=BEARER)
    ),
    "drain_forbidden": only(
        CHAT, sending(lambda _: None, on=keyed(), path="/v1/replicas/0/drain", headers=BEARER)
    ),
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
