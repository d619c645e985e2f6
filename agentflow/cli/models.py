"""``agentflow models``: the models on this machine and the models that can be pulled, or the models of a
server."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentflow.backends.apis.chat.flavours import CONTEXT_FIELDS
from agentflow.cli.command import Command, printable
from agentflow.cli.server_query import API_KEY_VARIABLE, http_url, query_server
from agentflow.engine.options import KvDtype, Quantize
from agentflow.errors import BadArgument, BadModelFolder, EngineFailed, ProtocolError

MODELS_PATH = "/v1/models"
LOCAL_COLUMNS = ("model", "here", "size", "memory", "fits", "context", "chat", "tools", "images", "licence")
SERVER_COLUMNS = ("model", "owner", "context", "loaded")
NUMBERS = ("size", "memory", "fits", "context")
DISPENSABLE = ("images", "tools", "chat", "licence", "context", "here", "size")
"""The columns that are omitted on a narrow terminal, in this order."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS = re.compile(r"\{[{%][^}]*?\btools\b")


def local_models(quantize: str | None = None, kv_dtype: str = "auto") -> list[tuple[str, ...]]:
    """A row of ``LOCAL_COLUMNS`` for each model with a short name, and for other models in the hub's cache.
    ``quantize``, ``kv_dtype``: as in ``EngineSettings``."""
    from agentflow.engine.models.memory_need import bytes_of_weight, work_bytes
    from agentflow.engine.store.catalog import CATALOG
    from agentflow.engine.store.hub_names import HubName, cached_models

    room = _Room(quantize, kv_dtype)
    try:
        cached = {str(name): path for name, path in cached_models()}
    except ImportError:  # without the engine, there is no hub
        cached = {}
    rows: list[tuple[str, ...]] = []
    for name, model in CATALOG.items():
        known = _known_folder(name)
        folder = cached.pop(str(HubName(model.repository)), None) if known is None else known
        if folder is not None:
            rows.append((name, "yes", *describe_model(folder, room), model.licence))
            continue
        needs = room.describe(
            int(bytes_of_weight(quantize) * model.parameters) + work_bytes(model.vocabulary),
            (1 if kv_dtype == "fp8" else 2) * model.kv_numbers_per_token,
            model.context,
        )
        licence = f"{model.licence} (gated)" if model.is_gated else model.licence
        rows.append((name, "no", _size(model.disk_bytes), *needs, "-", "-", "-", licence))
    for name, path in cached.items():
        described = describe_model(path, room)
        if "damaged" not in described:  # or no language model: the cache has models of any kind
            rows.append((name, "yes", *described, "-"))
    return rows


def models_at(
    names: Sequence[str], quantize: str | None = None, kv_dtype: str = "auto"
) -> list[tuple[str, ...]]:
    """A row of ``LOCAL_COLUMNS`` for each of these folders, GGUF files or names. ``UnknownModel`` or
    ``BadModelFolder``."""
    from agentflow.engine.store.model_store import resolve_model

    room = _Room(quantize, kv_dtype)
    return [(name, "yes", *_described(resolve_model(name), room), "-") for name in names]


def _known_folder(name: str) -> Path | None:
    from agentflow.engine.store.model_store import KNOWN_MODELS, pulled_folder

    return pulled_folder(name) if name in KNOWN_MODELS else None


class _Room:
    """The memory that models may take on this machine. ``quantize``, ``kv_dtype``: as in
    ``EngineSettings``."""

    def __init__(self, quantize: str | None = None, kv_dtype: str = "auto") -> None:
        self.quantize, self.kv_dtype = quantize, kv_dtype
        self._free_bytes: int | None = None
        self.is_on_gpu = False
        with contextlib.suppress(ImportError, EngineFailed):
            from agentflow.engine.machine.resources import free_memory
            from agentflow.server.config.schema import EngineConfig

            free = anyio.run(free_memory, [None])
            num_bytes = free.host_bytes if free.cuda_bytes is None else free.cuda_bytes
            self.is_on_gpu = free.cuda_bytes is not None
            self._free_bytes = int(num_bytes * EngineConfig().memory_share)

    def describe(self, fixed: int, per_token: int, context: int) -> tuple[str, str, str]:
        """The memory that a model needs with one whole context, whether this is free, and the context. If
        there is no room for the whole context, the tokens that fit instead of "yes". ``fixed``: bytes without
        the KV; ``per_token``: bytes of the KV of a token."""
        from agentflow.engine.models.memory_need import MIN_KV_TOKENS

        needed = _size(fixed + per_token * context)
        if self._free_bytes is None:
            return needed, "-", f"{context:,}"
        tokens = (self._free_bytes - fixed) // per_token
        fits = "yes" if tokens >= context else f"{tokens:,} tokens" if tokens >= MIN_KV_TOKENS else "no"
        return needed, fits, f"{context:,}"


def describe_model(path: Path, room: _Room) -> tuple[str, ...]:
    """Size, memory, fit, context, chat template, and support of tools and images of a model folder or GGUF
    file, as shown."""
    try:
        return _described(path, room)
    except (BadModelFolder, OSError, ValueError):
        return (_size(_file_bytes(path)), "damaged", "-", "-", "-", "-", "-")


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _described(path: Path, room: _Room) -> tuple[str, ...]:
    from agentflow.engine.models.memory_need import memory_need, read_shape
    from agentflow.engine.store.config_parts import text_config
    from agentflow.engine.store.native_architectures import IMAGE_ARCHITECTURES
    from agentflow.engine.text.tokenizer_files import chat_template_source

    need = memory_need("", path, "auto", None, room.quantize, kv_dtype=room.kv_dtype, on_gpu=room.is_on_gpu)
    config = text_config(read_shape(path)[0])
    architectures = config.get("architectures") or ()
    context = config.get("max_position_embeddings") or config.get("n_positions") or 2_048
    template = chat_template_source(path)
    return (
        _size(_file_bytes(path)),
        *room.describe(need.fixed_bytes, need.kv_bytes_per_token, int(context)),
        _yes(template is not None),
        _yes(template is not None and names_tools(template)),
        _yes(not IMAGE_ARCHITECTURES.isdisjoint(architectures)),
    )


def names_tools(template: str) -> bool:
    """Whether a chat template uses tools, outside of its comments."""
    return _TOOLS.search(_COMMENT.sub("", template)) is not None


def server_models(content: bytes, url: str) -> list[tuple[str, ...]]:
    """A row of ``SERVER_COLUMNS`` for each model in an answer in OpenAI's format. ``ProtocolError`` for other
    content."""
    try:
        models = json.loads(content)["data"]
        return [_server_row(model) for model in models]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, OSError):
        raise ProtocolError(f"{url} answered {MODELS_PATH} without a list of models") from None


def _server_row(model: dict[str, Any]) -> tuple[str, ...]:
    context = next((model[name] for name in CONTEXT_FIELDS if model.get(name)), None)
    created = model.get("created")
    since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M UTC") if created else "-"
    return (
        str(model["id"]),
        str(model.get("owned_by") or "-"),
        f"{context:,}" if isinstance(context, int) else "-",
        since,
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints a table or, without a terminal, lines with tabs between the cells."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        for row in [columns, *rows]:
            print("\t".join(row), file=console.file)  # rich would replace the tabs by spaces
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    shown = list(range(len(columns)))
    for name in DISPENSABLE:
        if sum(widths[i] + 2 for i in shown) > console.width and name in columns:
            shown.remove(columns.index(name))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for i in shown:
        justify: Literal["left", "right"] = "right" if columns[i] in NUMBERS else "left"
        least = None if columns[i] in ("model", "licence") else widths[i]
        table.add_column(columns[i], justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))
    console.print(table)


def _size(num_bytes: int) -> str:
    if num_bytes < 5e5:
        return f"{num_bytes / 1e3:,.0f} kB"
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="*", metavar="MODEL", help="show only these: a model folder, a .gguf file, or a name"
    )
    parser.add_argument("--quantize", choices=get_args(Quantize), help="the memory with weights of this type")
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), help="the memory with this type of KV")
    parser.add_argument("--url", help="list the models of this server, such as http://127.0.0.1:8410")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {API_KEY_VARIABLE})")


def _run(options: argparse.Namespace) -> int:
    console = Console()
    if options.url is not None and options.model:
        raise BadArgument("models: --url lists the models of a server: give it, or models of this machine")
    if options.url is not None:
        url = http_url(options.url)
        print_table(
            SERVER_COLUMNS, server_models(query_server(url, MODELS_PATH, options.api_key), url), console
        )
        return 0
    how = options.quantize, options.kv_dtype or "auto"
    rows = models_at(options.model, *how) if options.model else local_models(*how)
    print_table(LOCAL_COLUMNS, rows, console)
    if console.is_terminal:
        text = (
            "\nmemory: weights, KV of one whole context, and working memory; fits: in free memory\n"
            "Any OWNER/NAME of the Hugging Face hub, model folder or .gguf file can be served too."
        )
        console.print(Text(text), style="dim")
    return 0


COMMAND = Command(
    name="models",
    summary="list the models on this machine, or on a server",
    description="""\
Lists the models with short names and the models in the cache of the Hugging
Face hub, or the given models, with the memory that they need with --dtype auto
(weights, KV of one whole context, and working memory), whether it is free (or
the number of tokens that fit), and whether they have a chat template and
support tools. The size of a model that was not pulled is the size of its
files. With --url: the models of a server. Without a terminal, columns are
separated by tabs.""",
    examples="""\
agentflow models
agentflow models ./my-llama tiny-Q4_K_M.gguf
agentflow models --quantize fp8 --kv-dtype fp8
agentflow models --url http://127.0.0.1:8410
agentflow models | cut -f 1          the first column
""",
    add_options=_add_options,
    run=_run,
)
