"""The shared library of the native kernels: compiled once on this machine, kept in the user's cache, loaded.

The sources are in ``native/``. They are compiled for the best of ``LEVELS`` that the processor has;
``AGENTFLOW_CPU`` names a lower one. What is compiled is kept under a name that its sources, its command and
the compiler's version determine, so that it is never stale.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from platformdirs import user_cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 300

AVX2 = ("avx2", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_BF16 = (*AVX512, "avx512_bf16")
LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx": (*AVX512_BF16, "amx_tile", "amx_bf16"),
}
"""Which instructions a processor must have, by name, as Linux lists them; the best is last."""


class NoNativeKernels(Exception):
    """They cannot be had here; says why."""


class CompilerFails(NoNativeKernels):
    """The compiler does not know their instructions, or anything else is wrong with it."""


def native_level() -> str:
    """The best of ``native_levels``."""
    return native_levels()[0]


def native_levels() -> list[str]:
    """Those of ``LEVELS`` that this processor has and ``AGENTFLOW_CPU`` allows, the best first.
    NoNativeKernels where there is none, ValueError for an unknown name."""
    wanted = os.environ.get("AGENTFLOW_CPU", "")
    if wanted and wanted not in LEVELS:
        raise ValueError(f"AGENTFLOW_CPU is {wanted!r}: it must be one of {', '.join(LEVELS)}")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoNativeKernels(f"there are none for {platform.machine()} on {platform.system()}")
    there = cpu_flags()
    found: list[str] = []
    for level, needed in LEVELS.items():
        if not there.issuperset(needed):
            break
        found.insert(0, level)
        if level == wanted:
            break
    if not found:
        raise NoNativeKernels("this processor has no AVX2")
    return found


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's features, as Linux lists them; none elsewhere."""
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def is_compiled(level: str) -> bool:
    """Whether they are there already. NoNativeKernels without a compiler."""
    return _library_path(level).exists()


def load_best() -> ctypes.CDLL:
    """The kernels for the best of ``native_levels`` that the compiler can compile them for: older ones do not
    know all instructions. NoNativeKernels where there is none."""
    levels = native_levels()
    why: list[CompilerFails] = []
    for level in levels:
        try:
            library = load_library(level)
        except CompilerFails as error:
            why.append(error)
            continue
        if why:
            logger.warning("the native kernels are for %s instead of %s: %s", level, levels[0], why[0])
        return library
    raise why[0]


def load_library(level: str) -> ctypes.CDLL:
    """The kernels compiled for ``level``; the first call on a machine compiles them, which takes a few
    seconds. NoNativeKernels where that fails."""
    path = _library_path(level)
    if not path.exists():
        _compile(level, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNativeKernels(f"{path} cannot be loaded: {error}") from error


def _library_path(level: str) -> Path:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(" ".join(_command(level)).encode())
    digest.update(_run([*_compiler(), "--version"]).encode())
    cache = os.environ.get("AGENTFLOW_CACHE") or user_cache_dir("agentflow")
    return Path(cache).expanduser() / "kernels" / f"{level}-{digest.hexdigest()[:16]}.so"


@functools.cache
def _compiler() -> tuple[str, ...]:
    named = os.environ.get("CXX")
    if named:
        return tuple(shlex.split(named))
    for name in COMPILERS:
        if found := shutil.which(name):
            return (found,)
    raise NoNativeKernels(f"there is no C++ compiler ({', '.join(COMPILERS)}) to build them with")


def _command(level: str) -> list[str]:
    # The instructions of AMX are written as assembler: a compiler need not know them.
    options = [f"-m{name.replace('_', '')}" for name in LEVELS[level] if not name.startswith("amx")]
    if level == "amx":
        options.append("-DAGENTFLOW_TILES")
    return [*_compiler(), *FLAGS, *options, str(SOURCES / "entry.cpp")]


def _compile(level: str, path: Path) -> None:
    """Under another name first: other processes may be looking for it, or compiling it too."""
    logger.info("compiling the native kernels for %s (once on this machine, a few seconds)", level)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _run([*_command(level), "-o", str(made)])
            made.replace(path)
    except OSError as error:
        raise NoNativeKernels(f"they cannot be kept in {path.parent}: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernels(f"the compiler cannot be run: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CompilerFails(f"the compiler fails: {errors[0] if errors else done.stderr.strip()}")
    return done.stdout
