"""``agentflow models``: the models on this machine and those that can be pulled, or those of a server."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentflow.cli.command import Command, printable
from agentflow.cli.server_query import API_KEY_VARIABLE, http_url, query_server
from agentflow.errors import BadModelFolder, ProtocolError

MODELS_PATH = "/v1/models"
LOCAL_COLUMNS = ("model", "here", "size", "architecture", "context", "chat", "tools")
SERVER_COLUMNS = ("model", "owner", "context", "loaded")
CONTEXT_NAMES = ("context_length", "max_model_len", "context_window")
"""Names of the field in the answers of servers. OpenAI's API has no such field."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS = re.compile(r"\{[{%][^}]*?\btools\b")


def local_models() -> list[tuple[str, ...]]:
    """A row of ``LOCAL_COLUMNS`` for each known model."""
    from agentflow.engine.store.model_store import KNOWN_MODELS, pulled_folder

    rows: list[tuple[str, ...]] = []
    for name, source in KNOWN_MODELS.items():
        folder = pulled_folder(name)
        if folder is None:
            rows.append((name, "no", f"{_megabytes(source.wheel_bytes)} to pull", "-", "-", "-", "-"))
        else:
            rows.append((name, "yes", *describe_folder(folder)))
    return rows


def describe_folder(folder: Path) -> tuple[str, ...]:
    """Size, architecture, context, chat template and tool support of a model folder, as shown."""
    from agentflow.engine.text.tokenizer_files import chat_template_source, read_json

    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        config = read_json(folder / "config.json") or {}
        template = chat_template_source(folder)
    except BadModelFolder:
        return (_megabytes(size), "damaged", "-", "-", "-")
    architecture = (config.get("architectures") or [config.get("model_type", "-")])[0]
    context = config.get("max_position_embeddings")
    return (
        _megabytes(size),
        str(architecture),
        f"{context:,}" if isinstance(context, int) else "-",
        _yes(template is not None),
        _yes(template is not None and names_tools(template)),
    )


def names_tools(template: str) -> bool:
    """Whether a chat template uses tools, outside of its comments."""
    return _TOOLS.search(_COMMENT.sub("", template)) is not None


def server_models(content: bytes, url: str) -> list[tuple[str, ...]]:
    """A row of ``SERVER_COLUMNS`` for each model in an answer in OpenAI's format. ``ProtocolError`` if it is
    not one."""
    try:
        models = json.loads(content)["data"]
        return [_server_row(model) for model in models]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtocolError(f"{url} answered {MODELS_PATH} without a list of models") from None


def _server_row(model: dict[str, Any]) -> tuple[str, ...]:
    context = next((model[name] for name in CONTEXT_NAMES if model.get(name)), None)
    created = model.get("created")
    since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M UTC") if created else "-"
    return (
        str(model["id"]),
        str(model.get("owned_by") or "-"),
        f"{context:,}" if isinstance(context, int) else "-",
        since,
    )


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints a table; without a terminal, lines with tabs between the cells."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        for row in [columns, *rows]:
            print("\t".join(row), file=console.file)  # rich would replace the tabs by spaces
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        is_number = column in ("size", "context")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="list the models of this server, such as http://127.0.0.1:8410")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {API_KEY_VARIABLE})")


def _run(options: argparse.Namespace) -> int:
    console = Console()
    if options.url is not None:
        url = http_url(options.url)
        show(SERVER_COLUMNS, server_models(query_server(url, MODELS_PATH, options.api_key), url), console)
        return 0
    from agentflow.engine.store.model_store import store_folder

    show(LOCAL_COLUMNS, local_models(), console)
    if console.is_terminal:
        console.print(Text(f"\nin {store_folder()}; any Hugging Face folder can be served too"), style="dim")
    return 0


COMMAND = Command(
    name="models",
    summary="list the models on this machine, or on a server",
    description="""\
Lists the models that are on this machine or can be pulled, with their size,
their context in tokens, and whether they have a chat template and support
tools. With --url: the models of a server. Without a terminal, the columns are
separated by tabs.""",
    examples="""\
agentflow models
agentflow models --url http://127.0.0.1:8410
agentflow models | cut -f 1          the first column
""",
    add_options=_add_options,
    run=_run,
)
