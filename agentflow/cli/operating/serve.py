"""``agentflow serve``: runs the server with the effective configuration."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentflow.cli.command import Command
from agentflow.cli.operating.served_apis import configured_backend, open_api_generator
from agentflow.engine.machine.child_process import lower_priority
from agentflow.server.addresses import is_loopback
from agentflow.server.config.config import add_config_flags, read_flags
from agentflow.server.config.schema import NetworkConfig, ServeConfig, StoresConfig

if TYPE_CHECKING:
    from agentflow.engine.process.shutdown_budget import ShutdownBudget
    from agentflow.server.app import Access
    from agentflow.server.models.models import OpenModels
    from agentflow.server.serve import RunningServer, Tls
    from agentflow.server.stores.shared import SharedStore

logger = logging.getLogger(__name__)


def pull_missing(config: ServeConfig) -> None:
    """Pulls missing models and adapters of the configuration."""
    from agentflow.engine.store.adapter_folder import missing_adapters
    from agentflow.engine.store.model_store import is_missing, pull_model

    for model in config.models:
        if model.api is not None:
            continue
        if is_missing(model.path):
            pull_model(model.path)
        for adapter in missing_adapters(model.engine_options().loras):
            pull_model(adapter)


def run_serve(
    config: ServeConfig, on_ready: Callable[[RunningServer], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Serves until SIGINT or SIGTERM. Errors of models, keys or certificates are raised before anything is
    loaded. ``on_ready`` runs once the server is ready; without one, it prints its addresses."""
    from agentflow.engine.process.shutdown_budget import ShutdownBudget
    from agentflow.server.http.acceptor import with_descriptors
    from agentflow.server.serve import running_server, serve

    network = config.network
    shutdown = ShutdownBudget(config.overload.drain_s)
    parts = server_parts(config, shutdown)
    running = running_server(
        parts.open_models,
        host=network.host,
        port=network.port,
        limits=with_descriptors(config.server_limits),
        http_limits=config.http_limits,
        access=parts.access,
        shared=parts.shared,
        tls=_tls(network),
    )
    serve(running, shutdown=shutdown, on_ready=on_ready)


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The parts of a server, except its limits and its address."""

    open_models: OpenModels
    access: Access
    shared: SharedStore | None  # of several servers


def server_parts(config: ServeConfig, shutdown: ShutdownBudget) -> ServerParts:
    """Sets up the log, and reads the keys. ``shutdown``: limits the time to stop the engines."""
    from agentflow.server.app import Access
    from agentflow.server.log import set_up_logs
    from agentflow.server.models.open_models import open_models
    from agentflow.server.tenants.keys import Tenants
    from agentflow.server.tenants.rate_limit import TenantGate
    from agentflow.server.tenants.shared_limit import SharedGate
    from agentflow.server.tenants.shared_tickets import SharedTickets

    set_up_logs(config.logs.log_level, config.logs.log_format)
    tenants = Tenants(config.access.api_keys, config.access.keys_path)
    network = config.network
    _warn_of_open_keys(network, tenants.need_keys)
    if unused := config.cluster.unused:
        logger.warning("%s: without cluster ray, engines run on this machine", ", ".join(unused))
    shared = _shared_store(config.stores)
    gate = TenantGate(current=tenants.current)
    if shared is not None:
        gate, tenants.tickets = SharedGate(shared, current=tenants.current), SharedTickets(shared)
    models = {
        model.name: model.engine_options()
        if model.api is None
        else partial(open_api_generator, configured_backend(model))
        for model in config.models
    }
    return ServerParts(
        lambda: open_models(
            models,
            memory_share=config.engine.memory_share,
            compile_limits=config.compile_limits,
            gate=gate,
            max_wait_s=config.overload.max_wait_s,
            record_to=config.logs.workload_path,
            shutdown=shutdown,
            aliases={model.name: model.aliases for model in config.models},
            image_hosts=network.image_hosts,
            ray=config.cluster.ray_options(),
        ),
        Access(
            tenants,
            network.cors_origins,
            _known_names(network),
            logs_prompts=config.logs.log_prompts,
            has_page=network.ui,
        ),
        shared,
    )


def _warn_of_open_keys(network: NetworkConfig, need_keys: bool) -> None:
    if need_keys and network.tls_cert is None and not is_loopback(network.host):
        logger.warning(
            "API keys are sent to %s unencrypted: give --tls-cert and --tls-key, or allow connections "
            "only from a proxy that terminates TLS",
            network.host,
        )


def _known_names(network: NetworkConfig) -> tuple[str, ...] | None:
    """Accepted host names. A server that listens on loopback only accepts loopback names; None: ``Access``
    decides."""
    if network.allowed_hosts:
        return network.allowed_hosts
    return (network.host,) if is_loopback(network.host) else None


def _shared_store(stores: StoresConfig) -> SharedStore | None:
    from agentflow.server.stores.shared import SharedStore

    if stores.redis_url is None:
        return None
    return SharedStore(stores.redis_url, prefix=stores.redis_prefix, front=stores.front_name)


def _tls(network: NetworkConfig) -> Tls | None:
    from agentflow.server.serve import Tls

    if network.tls_cert is None or network.tls_key is None:
        return None
    certificate, key = Path(network.tls_cert).expanduser(), Path(network.tls_key).expanduser()
    return Tls(certificate, key, network.tls_key_password)


def _run(options: argparse.Namespace) -> int:
    config = read_flags(options).config
    pull_missing(config)
    lower_priority()
    run_serve(config)
    return 0


COMMAND = Command(
    name="serve",
    usage="agentflow serve [MODEL ...] [--config FILE] [--port N] ...",
    summary="run the server",
    description="""\
Serves models to programs on this machine or others. One port has three
interfaces:

  af.session("ws://HOST:PORT")                     agentflow's own sessions
  OpenAI(base_url="http://HOST:PORT/v1")           clients of OpenAI's API
  Anthropic(base_url="http://HOST:PORT")           clients of Anthropic's API

Every option is also an environment variable (AGENTFLOW_SERVE_KV_TOKENS for
--kv-tokens) and a key of the TOML file (kv_tokens in [engine]). Flags take
precedence over variables, and variables over the file. `agentflow config`
takes the same options and shows each value with its source.""",
    examples="""\
agentflow serve                              the default model
agentflow serve qwen3-0.6b                   another, by its short name
agentflow serve OWNER/NAME                   or from the Hugging Face hub
agentflow serve ./my-llama --port 9000
agentflow serve gpt=openai:gpt-4.1-mini      a model behind an API
agentflow serve --config server.toml         settings from a file
AGENTFLOW_SERVE_PORT=9000 agentflow serve    or from the environment
agentflow serve --host 0.0.0.0 --keys-file keys.toml
""",
    add_options=add_config_flags,
    run=_run,
)
