"""``agentflow serve``: runs the server with the configuration that holds."""

from __future__ import annotations

import argparse

from agentflow.command import Command
from agentflow.errors import NotSupported
from agentflow.server.config_flags import add_config_flags, read_flags
from agentflow.server.config_schema import ServeConfig
from agentflow.server.config_setting import all_settings

NOT_SERVED_YET = (
    "memory_share",
    "tls_cert",
    "cors_origins",
    "allowed_hosts",
    "keys_file",
    "api_keys",
    "body_bytes",
    "max_prompt_tokens",
    "max_n",
    "header_timeout_s",
    "compile_cpu_s",
    "compile_wall_s",
    "compile_memory_bytes",
    "compile_cpu_share",
    "compile_cache_bytes",
    "body_timeout_s",
    "max_wait_s",
    "drain_s",
    "log_prompts",
)
"""Settings that the server does not follow yet: changing one is refused, not ignored."""


def run_serve(config: ServeConfig) -> None:
    """Serves until it is told to end."""
    from agentflow.server.local_engine import open_generator
    from agentflow.server.log_setup import set_up_logs
    from agentflow.server.model_store import resolve_model
    from agentflow.server.serve import serve

    _refuse_what_is_not_served(config)
    set_up_logs(config.logs.log_level, config.logs.log_format)
    model = config.models[0]
    resolve_model(model.path)  # a wrong name is told before anything starts
    serve(
        lambda: open_generator(model.engine_options(), record_to=config.logs.workload_path),
        host=config.network.host,
        port=config.network.port,
        limits=config.limits.server_limits(),
    )


def _refuse_what_is_not_served(config: ServeConfig) -> None:
    if len(config.models) > 1:
        raise NotSupported("this server runs one model: give one --model")
    settings = (all_settings()[name] for name in NOT_SERVED_YET)
    changed = [one.name for one in settings if getattr(getattr(config, one.group), one.name) != one.default]
    if changed:
        raise NotSupported(f"this server does not follow {', '.join(changed)} yet: leave that out")


def _run(options: argparse.Namespace) -> int:
    run_serve(read_flags(options).config)
    return 0


COMMAND = Command(
    name="serve",
    usage="agentflow serve [--model NAME[=PATH]] [--config FILE] [--port N] ...",
    summary="run the server",
    description="""\
Serves models to programs on this machine or others:
af.session("ws://HOST:PORT") connects to it.

Every option is also an environment variable (AGENTFLOW_SERVE_KV_TOKENS for
--kv-tokens) and a key of the TOML file (kv_tokens in [engine]). A flag comes
before a variable, a variable before the file. `agentflow config` takes the
same options and shows what holds, and where it is from.""",
    examples="""\
agentflow serve                              the default model
agentflow serve --model ./my-llama --port 9000
agentflow serve --config server.toml         settings from a file
AGENTFLOW_SERVE_PORT=9000 agentflow serve    or from the environment
agentflow serve --host 0.0.0.0 --keys-file keys.toml
""",
    add_options=add_config_flags,
    run=_run,
)
