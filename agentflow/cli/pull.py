"""``agentflow pull``: fetches a model or an adapter into the store, or into the Hugging Face hub's cache."""

from __future__ import annotations

import argparse
import os

from agentflow.cli.command import Command
from agentflow.protocol.wire import DEFAULT_MODEL


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a short name, or the hub's OWNER/NAME[:QUANTISATION][@REVISION] (default: %(default)s)",
    )


def _run(options: argparse.Namespace) -> int:
    from agentflow.engine.store.model_store import pull_model

    folder = pull_model(options.model)
    print(f"{options.model} is ready in {folder}")
    _compile_kernels()
    return 0


def _compile_kernels() -> None:
    """Compiles the CPU kernels now, so that the first engine starts without a delay, unless
    ``AGENTFLOW_KERNELS`` selects others."""
    if os.environ.get("AGENTFLOW_KERNELS") not in (None, "", "native"):
        return
    from agentflow.kernels.native_library import NoNativeKernels, is_compiled, load_best, native_level

    try:
        level = native_level()
        if not is_compiled(level):
            print(f"compiling the CPU kernels for {level} (about 25 seconds) …", flush=True)
            load_best()
    except (NoNativeKernels, ValueError) as error:
        print(f"no native CPU kernels, so engines will use the slower torch kernels: {error}")


COMMAND = Command(
    name="pull",
    summary="fetch a model",
    description="""\
Fetches a model or an adapter (LoRA), or its changed files, and verifies all
files. Files from the Hugging Face hub are stored in its cache, which other
tools share; HF_TOKEN, HF_ENDPOINT and HF_HOME have their usual meaning.""",
    examples="""\
agentflow pull                      the default model
agentflow pull qwen3-0.6b           another, by its short name
agentflow pull OWNER/NAME           a repository with safetensors
agentflow pull OWNER/NAME:Q4_K_M    a GGUF file in a repository
agentflow models                    the short names, and local models
""",
    add_options=_add_options,
    run=_run,
)
