"""The server as an application of Ray Serve, which scales it, updates it, and routes requests to it.

``serve run agentflow.cli.operating.ray_serve:app model=qwen3-0.6b`` starts it, or a file of Serve does, with
``import_path: agentflow.cli.operating.ray_serve:app`` and the settings of ``agentflow serve`` as ``args``.
The deployment is named ``agentflow``. Each of its replicas is a whole server with engines, without a port:
Serve's proxies forward requests and websockets. Serve's settings of deployments (``autoscaling_config``,
``ray_actor_options``, ``max_ongoing_requests``) apply to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette

from agentflow.cli.operating.serve import pull_missing, server_parts
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import BadArgument
from agentflow.server.app import create_app
from agentflow.server.config.config import Flags, load_config
from agentflow.server.config.schema import ServeConfig, all_settings

MAX_ONGOING_REQUESTS = 256
"""Serve's default of 5 is for models that compute one request at a time."""

MAX_SURGE_PERCENT = 1
"""The percentage of additional replicas in a rolling update, rounded up to one: Serve starts a new replica
before it ends an old one. With Serve's default of 0, an old one ends first, so a single replica is down for a
while."""


def read_serve_config(args: Mapping[str, Any]) -> ServeConfig:
    """The configuration from the arguments of an application: settings of ``agentflow serve`` by their names
    (``kv_tokens``), ``model`` (``NAME[=PATH]``, or several) and ``config`` (a file). ``BadArgument`` for
    unknown arguments."""
    values: dict[str, str | list[str] | bool] = {"host": "0.0.0.0"}  # Serve's proxies may listen anywhere
    models: list[str] = []
    file: str | None = None
    for name, value in args.items():
        if name == "model":
            models += [value] if isinstance(value, str) else [str(one) for one in value]
        elif name == "config":
            file = str(value)
        elif (setting := all_settings().get(name)) is None:
            raise BadArgument(
                f"the application has no argument {name!r}: use the settings of `agentflow serve`"
            )
        elif setting.is_list:
            values[name] = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        elif setting.is_switch:
            values[name] = bool(setting.from_text(str(value), name))
        else:
            values[name] = str(value)
    return load_config(Flags(values, tuple(models), file), os.environ).config


class AgentflowServer:
    """One replica."""

    running: Starlette | None = None

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that fails several times in a row. Raises an error if an
        engine cannot serve."""
        app = type(self).running
        assert app is not None
        if app.state.service is not None:
            for model in app.state.service.models:
                await model.generator(ANONYMOUS).stats()


def app(args: dict[str, Any]) -> Application:
    """The application. ``BadArgument`` for invalid settings.

    Args:
        args: the settings, as for ``read_serve_config``.
    """
    read_serve_config(args)  # before a replica starts

    def build() -> Starlette:
        config = read_serve_config(args)
        pull_missing(config)
        parts = server_parts(config, ShutdownBudget(config.overload.drain_s))
        running = create_app(
            parts.open_models,
            config.server_limits,
            http_limits=config.http_limits,
            access=parts.access,
            shared=parts.shared,
        )
        AgentflowServer.running = running
        return running

    deployment = serve.deployment(
        name="agentflow",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 1},
        max_surge_percent=MAX_SURGE_PERCENT,
    )
    return deployment(serve.ingress(build)(AgentflowServer)).bind()
