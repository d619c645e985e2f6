"""``agentflow doctor``: checks whether this machine can run agentflow, and prints a remedy for each problem.

Each check is a function that returns a ``Check``. None of them loads torch or a model into this process,
compiles or downloads anything, and all of them work in a bare install. With an NVIDIA driver and a CUDA build
of torch, a child process asks CUDA for the free memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentflow.cli.command import Command
from agentflow.errors import AgentflowError, BadArgument, EngineFailed
from agentflow.protocol.wire import DEFAULT_MODEL, DEFAULT_PORT

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "agentflow-lm"
# Extras for work on agentflow itself.
DEVELOPMENT = ("dev", "docs", "examples")
# Optional extras: a program may run on a server.
OPTIONAL = {
    "engine": "programs run on a server, not in this process",
    "server": "there is no `agentflow serve`",
}
# uv finds the right build for the machine; pip uses its default index, which has CUDA builds for Linux.
INSTALL_ENGINE = f"uv pip install --torch-backend=auto '{DISTRIBUTION}[engine]'"

CheckStatus = Literal["ok", "warning", "error"]
MARKS: Mapping[CheckStatus, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warning": ("!", "!", "yellow"),
    "error": ("✗", "x", "red"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """``found``: the result. ``advice``: how to fix it; empty if nothing is wrong."""

    name: str
    status: CheckStatus
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """``cuda``: the version of CUDA that it was built for; None for a CPU build."""

    version: str
    cuda: str | None


def checks(model: str, host: str, port: int) -> Iterator[Check]:
    """All checks of this machine, in the order of the table."""
    from agentflow.engine.machine.resources import has_driver

    build, is_nvidia = torch_build(), has_driver()
    yield check_python()
    yield from check_packages()
    yield check_torch(build, is_nvidia=is_nvidia, system=platform.system())
    yield check_processor()
    yield check_compiler()
    yield from check_model(model, build, is_nvidia=is_nvidia)
    yield check_port(host, port)
    url = os.environ.get("AGENTFLOW_URL")
    if url:
        yield Check("server", "ok", f"AGENTFLOW_URL is set: sessions connect to {url} by default")


def check_python(running: str | None = None) -> Check:
    """Whether this version of Python is supported."""
    from packaging.specifiers import SpecifierSet

    running = running or platform.python_version()
    where = f"{running} ({sys.executable})"
    try:
        declared = distribution(DISTRIBUTION).metadata["Requires-Python"]
    except PackageNotFoundError:
        return Check("Python", "ok", where)
    if running in SpecifierSet(declared, prereleases=True):
        return Check("Python", "ok", where)
    return Check("Python", "error", where, f"agentflow needs Python {declared}: make another environment")


def check_packages() -> Iterator[Check]:
    """Whether the packages of agentflow and of its extras are installed in the versions that it declares."""
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        advice = "run `pip install .` in the checkout"
        yield Check("packages", "error", f"{DISTRIBUTION} is not installed in this environment", advice)
        return
    extras = [name for name in found.metadata.get_all("Provides-Extra", []) if name not in DEVELOPMENT]
    for extra in ("", *extras):
        check = check_extra(found.requires or [], extra)
        if check is not None:
            yield check


def check_extra(requirements: Iterable[str], extra: str) -> Check | None:
    """The packages of one extra, or the base packages (""). None for an optional extra that is not installed.
    An extra counts as installed if most of the packages are that no other extra needs."""
    from packaging.requirements import Requirement

    of_extras = _by_extra(map(Requirement, requirements))
    others = {one.name for name, of in of_extras.items() if name not in (extra, *DEVELOPMENT) for one in of}
    missing: list[str] = []
    wrong: list[str] = []
    found_names: list[str] = []
    for requirement in of_extras.get(extra, ()):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement.name)
            continue
        found_names.append(requirement.name)
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} (needed: {requirement.specifier})")
    only_here = {*found_names, *missing} - others or {*found_names, *missing}
    is_installed = len(only_here.intersection(found_names)) > len(only_here.intersection(missing))
    name = f"[{extra}]" if extra else "packages"
    target = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
    if extra and not is_installed:
        if extra not in OPTIONAL:
            return None
        command = INSTALL_ENGINE if extra == "engine" else f"pip install {target}"
        return Check(name, "warning", f"not installed: {OPTIONAL[extra]}", f"to have it: {command}")
    if not missing and not wrong:
        count = len(found_names)
        return Check(name, "ok", f"{count} {'package' if count == 1 else 'packages'}, in versions that fit")
    found = "; ".join([*(f"{package} is missing" for package in missing), *wrong])
    return Check(name, "error", found, f"pip install --upgrade {target}")


def _by_extra(requirements: Iterable[Requirement]) -> dict[str, list[Requirement]]:
    """The requirements that apply here, by extra; "": the base packages."""
    found: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        marker = requirement.marker
        named = re.findall(r"extra == [\"'](\w+)[\"']", str(marker or "")) or [""]
        for extra in named:
            if marker is None or marker.evaluate({"extra": extra}):
                found.setdefault(extra, []).append(requirement)
    return found


def torch_build() -> TorchBuild | None:
    """The installed build of torch, read from a file: importing torch takes seconds. None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    cuda = None
    described = Path(spec.origin).with_name("version.py")
    if described.exists():
        line = re.search(r"^cuda\b[^=]*= *'([^']+)'", described.read_text(encoding="utf-8"), re.MULTILINE)
        cuda = line and line[1]
    try:
        return TorchBuild(version("torch"), cuda)
    except PackageNotFoundError:
        return TorchBuild("of unknown version", cuda)


def check_torch(build: TorchBuild | None, *, is_nvidia: bool, system: str) -> Check:
    """Whether the build of torch fits the hardware."""
    gpu = "an NVIDIA driver" if is_nvidia else "no NVIDIA driver"
    if build is None:
        if system == "Linux" and not is_nvidia:
            return Check(
                "torch",
                "warning",
                f"not installed, and this machine has {gpu}",
                "pip would install the CUDA build of torch, about 5 GB with its dependencies. For the "
                f"engine, install the build for the CPU: {INSTALL_ENGINE}",
            )
        return Check("torch", "warning", f"not installed; this machine has {gpu}", INSTALL_ENGINE)
    if build.cuda is None and is_nvidia:
        return Check(
            "torch",
            "warning",
            f"{build.version} for the CPU, and this machine has {gpu}: the GPU is not used",
            "uv pip install --torch-backend=auto --reinstall torch",
        )
    if build.cuda is not None and not is_nvidia:
        return Check(
            "torch",
            "warning",
            f"{build.version} for CUDA {build.cuda}, and this machine has {gpu}: models run on the CPU",
            "it works. The CPU build is about 5 GB smaller: in a new environment, " + INSTALL_ENGINE,
        )
    what = "the CPU" if build.cuda is None else f"CUDA {build.cuda}"
    return Check("torch", "ok", f"{build.version} for {what}; this machine has {gpu}")


def check_processor() -> Check:
    """The instruction sets that the native kernels can use."""
    from agentflow.engine.machine.resources import usable_cpus
    from agentflow.kernels.native_library import NoNativeKernels, cpu_flags, native_level

    there = cpu_flags()
    families = {
        "AVX2": "avx2",
        "AVX-512": "avx512f",
        "VNNI": "avx512_vnni",
        "BF16": "avx512_bf16",
        "AMX": "amx_bf16",
    }
    names = ", ".join(name for name, flag in families.items() if flag in there) or "none that kernels use"
    count = usable_cpus()
    found = f"{count} usable {'core' if count == 1 else 'cores'}; instructions: {names}"
    try:
        level = native_level()
    except NoNativeKernels as error:
        return Check("processor", "warning", found, f"{error}: the engine runs on torch's operations, slower")
    except ValueError as error:
        return Check("processor", "error", found, str(error))
    return Check("processor", "ok", f"{found}; kernels for {level}")


def check_compiler() -> Check:
    """Whether the native kernels are compiled, or can be."""
    from agentflow.kernels.native_library import (
        PLATFORMS,
        NoNativeKernels,
        compiled_ahead,
        compiler,
        is_compiled,
        library_folder,
        native_level,
    )

    forced = os.environ.get("AGENTFLOW_KERNELS")
    if forced and forced not in PLATFORMS:
        return Check(
            "compiler", "error", f"AGENTFLOW_KERNELS is {forced!r}", f"one of {', '.join(PLATFORMS)}"
        )
    if forced and forced != "native":
        return Check("compiler", "ok", f"not needed: AGENTFLOW_KERNELS={forced}")
    try:
        level = native_level()
    except (NoNativeKernels, ValueError):
        return Check("compiler", "ok", "not needed: there are no native kernels for this processor")
    if (ahead := compiled_ahead(level)) is not None:
        return Check("compiler", "ok", f"not needed: the kernels for {level} are in {ahead.parent}")
    try:
        command = " ".join(compiler())
        is_ready = is_compiled(level)
    except NoNativeKernels as error:
        return Check(
            "compiler",
            "warning",
            str(error),
            "install g++ or clang++, or name a compiler in CXX: without one, the engine runs on torch's "
            "operations, at less than half the speed",
        )
    folder = library_folder()
    if not is_ready and not _is_writable(folder):
        return Check(
            "compiler",
            "warning",
            f"the kernels cannot be written to {folder}",
            "set AGENTFLOW_CACHE to another folder: the engine runs on torch's operations, at less than half "
            "the speed",
        )
    done = "compiled" if is_ready else "compiled when the engine first starts, in about 25 seconds"
    return Check("compiler", "ok", f"{command}; the kernels for {level} are {done}")


def _is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder that may have to be created."""
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def check_model(name: str, build: TorchBuild | None, *, is_nvidia: bool) -> Iterator[Check]:
    """Whether the model is on this machine, and fits into the free memory."""
    from agentflow.engine.store.model_store import KNOWN_MODELS, resolve_model

    try:
        folder = resolve_model(name)
    except AgentflowError as error:
        # Without the engine, no model is needed here.
        status: CheckStatus = "warning" if build is None else "error"
        advice = f"agentflow pull {name}" if name in KNOWN_MODELS else ""
        yield Check("model", status, f"{name} is not pulled" if advice else str(error), advice)
        return
    memory: Check | None = None
    if importlib.util.find_spec("psutil") is not None:
        asks_gpu = is_nvidia and build is not None and build.cuda is not None
        try:
            memory = check_memory(name, folder, asks_gpu=asks_gpu)
        except AgentflowError as error:  # such as a truncated file
            yield Check("model", "error", str(error))
            return
    yield Check("model", "ok", f"{name} in {folder}")
    if memory is not None:
        yield memory


def check_memory(name: str, folder: Path, *, asks_gpu: bool) -> Check:
    """Whether the model fits into the free memory."""
    import anyio

    from agentflow.engine.machine.resources import free_memory
    from agentflow.engine.models.memory_need import divide_memory, memory_need

    try:
        free = anyio.run(free_memory, [None if asks_gpu else "cpu"])
    except EngineFailed as error:
        return Check("memory", "warning", str(error), "see whether nvidia-smi works")
    num_bytes = free.host_bytes if free.cuda_bytes is None else free.cuda_bytes
    where = "memory" if free.cuda_bytes is None else "GPU memory"
    need = memory_need(name, folder, "auto", None, on_gpu=free.cuda_bytes is not None)
    found = (
        f"{num_bytes / 1e9:.1f} GB of {where} free; {name} has {need.weight_bytes / 1e9:.2f} GB of weights"
    )
    try:
        kv_tokens = divide_memory([need], num_bytes)[name]
    except BadArgument:
        return Check("memory", "error", found, "free some memory, or take a smaller model")
    return Check("memory", "ok", f"{found}, and there is room for {kv_tokens:,} tokens of KV cache")


def check_port(host: str, port: int) -> Check:
    """Whether ``agentflow serve`` can listen there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        advice = "a server may run there already; otherwise: agentflow serve --port PORT"
        return Check("port", "warning", f"{port} of {host} cannot be used: {why}", advice)
    return Check("port", "ok", f"{port} of {host} is free")


def print_checks(found: Iterable[Check], console: Console) -> None:
    """Prints the checks as a table."""
    is_unicode = console.encoding.lower().startswith("utf")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        mark, plain, style = MARKS[check.status]
        text = Text(check.found)
        if check.advice:
            text.append(f"\n→ {check.advice}" if is_unicode else f"\n-> {check.advice}", style=style)
        table.add_row(Text(mark if is_unicode else plain, style=style), Text(check.name, "bold"), text)
    console.print(table)


def summary(found: list[Check]) -> str:
    """The last line of the table."""
    problems = sum(check.status == "error" for check in found)
    warnings = sum(check.status == "warning" for check in found)
    if problems:
        return f"{problems} of {len(found)} checks failed: agentflow is not ready."
    if warnings:
        return f"agentflow is ready, with {warnings} {'warning' if warnings == 1 else 'warnings'}."
    return "agentflow is ready."


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model to look for (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve at (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="the port to serve at (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def _run(options: argparse.Namespace) -> int:
    found = list(checks(options.model, options.host, options.port))
    is_ready = all(check.status != "error" for check in found)
    if options.json:
        report: dict[str, Any] = {"ready": is_ready, "checks": [asdict(check) for check in found]}
        print(json.dumps(report, indent=2))
    else:
        console = Console()
        print_checks(found, console)
        console.print(f"\n{summary(found)}", highlight=False)
    return 0 if is_ready else 1


COMMAND = Command(
    name="doctor",
    summary="check this machine, and print remedies",
    description="""\
Checks Python, the installed packages, the build of torch, the processor, the
compiler, the model, the memory and the port, and prints a remedy for each
problem. Loads no model and downloads nothing. The exit status is 1 if
something necessary is missing.""",
    examples="""\
agentflow doctor
agentflow doctor --model path/to/folder --port 8411
agentflow doctor --json
""",
    add_options=_add_options,
    run=_run,
)
