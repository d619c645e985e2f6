"""``agentflow route``: a gateway in front of servers with OpenAI's API."""

from __future__ import annotations

import argparse
import os

from agentflow.cli.command import Command, port_number, positive_int
from agentflow.server.addresses import is_loopback
from agentflow.server.gateway.defaults import CACHE_TOKENS, DEFAULT_PORT, DRAIN_S, GatewayLimits

ADMIN_KEY_VARIABLE = "AGENTFLOW_ROUTE_ADMIN_KEY"
API_KEY_VARIABLE = "AGENTFLOW_ROUTE_API_KEY"
KEEPALIVE_S = 4.5  # many servers close idle connections after 5 s


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--to",
        action="append",
        default=[],
        metavar="URL",
        help="address of a server; give one for each",
    )
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=port_number, default=DEFAULT_PORT, metavar="N", help="port to listen at (%(default)s)")
    add(
        "--cache-tokens",
        type=positive_int,
        metavar="N",
        help=f"tokens in the cache of one server (default: as its metrics show, or {CACHE_TOKENS})",
    )
    add(
        "--timeout-s",
        type=positive_int,
        default=600,
        metavar="N",
        help="time until an answer begins (%(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"key for the gateway's own health checks (default: {API_KEY_VARIABLE}); clients send their own",
    )
    add(
        "--admin-key",
        metavar="KEY",
        help=f"key for /gateway/ and /metrics (default: {ADMIN_KEY_VARIABLE})",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin whose pages may use the gateway; can be repeated",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name of the gateway; can be repeated (default: names without public DNS)",
    )
    add(
        "--drain-s",
        type=positive_int,
        default=int(DRAIN_S),
        metavar="N",
        help="time for running requests to finish after SIGTERM (%(default)s)",
    )
    add(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="log level (%(default)s)",
    )


def _run(options: argparse.Namespace) -> int:
    from agentflow.backends.apis.http.connections import Connections
    from agentflow.server.gateway.gateway import Gateway
    from agentflow.server.gateway.route import route
    from agentflow.server.gateway.target import parse_targets
    from agentflow.server.log import set_up_logs
    from agentflow.server.origin_guard import accept_hosts, private_host
    from agentflow.server.tenants.keys import checked_key

    targets = parse_targets(options.to)
    api_key = options.api_key or os.environ.get(API_KEY_VARIABLE)
    admin_key = options.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    set_up_logs(options.log_level, "text")
    hosts = options.allowed_host or ([options.host] if is_loopback(options.host) else [])
    gateway = Gateway(
        targets,
        Connections(None, KEEPALIVE_S),
        limits=GatewayLimits(first_byte_s=options.timeout_s),
        cache_tokens=options.cache_tokens,
        api_key=api_key and checked_key(api_key),
        admin_key=admin_key and checked_key(admin_key),
        origins=options.cors_origin,
        knows_host=accept_hosts(hosts) if hosts else private_host,
    )
    route(gateway, host=options.host, port=options.port, drain_s=options.drain_s)
    return 0


COMMAND = Command(
    name="route",
    usage="agentflow route --to URL --to URL [--port N] ...",
    summary="run a gateway in front of several servers",
    description="""\
Distributes requests among servers with OpenAI's API, such as vLLM, SGLang,
llama.cpp, Ollama, and agentflow. A request is sent to the server that probably
has its prefix cached, unless waiting there would take longer than computing it
again. Clients use the gateway's address like the address of one server, with
the same paths and keys.""",
    examples="""\
agentflow route --to http://127.0.0.1:8000 --to http://127.0.0.1:8001
agentflow route --to http://a:8000/v1 --to http://b:8000/v1 --port 9000
agentflow route --to http://a:8000 --to http://b:8000 --cache-tokens 400000
""",
    add_options=_add_options,
    run=_run,
)
