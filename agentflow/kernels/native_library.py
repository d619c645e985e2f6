"""Compiles the native kernels once per machine, caches the shared library for the user, and loads it.

The sources in ``native/`` are compiled for the best of ``LEVELS`` that the processor supports;
``AGENTFLOW_CPU`` selects a lower level. The file name of the library contains a hash of the sources, the
command and the compiler's version, so a cached library is never stale.

Packages and container images compile ahead of time, for all levels: ``python -m agentflow.kernels FOLDER``.
If ``AGENTFLOW_COMPILED_KERNELS`` is that folder, its libraries are loaded and no compiler is needed. Their
names contain a hash of the sources and options, so another version of agentflow ignores them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 300
PLATFORMS = ("native", "triton", "torch", "reference")
"""The values of AGENTFLOW_KERNELS."""

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_VNNI = (*AVX512, "avx512_vnni")
AVX512_BF16 = (*AVX512_VNNI, "avx512_bf16")
# The CPU flags that each level needs, as Linux lists them. The last level is the best.
LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_vnni": AVX512_VNNI,
    "avx512_bf16": AVX512_BF16,
    "amx": (*AVX512_BF16, "amx_tile", "amx_bf16"),
}


class NoNativeKernels(Exception):
    """The native kernels are not available here; the message contains the reason."""


class CompilerFails(NoNativeKernels):
    """The compiler failed; it may be too old for the instructions of a level."""


def native_level() -> str:
    """Returns the best of ``native_levels``."""
    return native_levels()[0]


def keep_order() -> None:
    """Makes this process use kernels that sum each row in the same order regardless of the rest of its batch.
    This excludes the kernels for AMX, which multiply only large numbers of rows in tiles. Must be called
    before any kernels are loaded."""
    with contextlib.suppress(NoNativeKernels):
        if native_level() == "amx":
            os.environ["AGENTFLOW_CPU"] = "avx512_bf16"


def native_levels() -> list[str]:
    """Returns the ``LEVELS`` that this processor supports and ``AGENTFLOW_CPU`` allows, the best first.
    Raises ``NoNativeKernels`` if there is none, and ``ValueError`` if ``AGENTFLOW_CPU`` is unknown."""
    wanted = os.environ.get("AGENTFLOW_CPU", "")
    if wanted and wanted not in LEVELS:
        raise ValueError(f"AGENTFLOW_CPU is {wanted!r}: it must be one of {', '.join(LEVELS)}")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoNativeKernels(f"there are no native kernels for {platform.machine()} on {platform.system()}")
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
    """Returns the processor's flags, as Linux lists them; empty on other systems."""
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # on x86, on ARM
            return frozenset(value.split())
    return frozenset()


def is_compiled(level: str) -> bool:
    """Whether the library for a level was compiled, ahead of time or into the cache. Raises
    ``NoNativeKernels`` if it was not compiled ahead of time and there is no compiler."""
    return compiled_ahead(level) is not None or _library_path(level).exists()


def compiled_ahead(level: str) -> Path | None:
    """Returns the library for a level in ``AGENTFLOW_COMPILED_KERNELS``, or None."""
    folder = os.environ.get("AGENTFLOW_COMPILED_KERNELS")
    path = Path(folder).expanduser() / _ahead_name(level) if folder else None
    return path if path is not None and path.exists() else None


def compile_ahead(folder: Path) -> list[Path]:
    """Compiles the kernels for every level into ``folder``, including levels that this processor does not
    support. Returns the files. Raises ``NoNativeKernels`` if a level cannot be compiled."""
    paths = [folder / _ahead_name(level) for level in LEVELS]
    for level, path in zip(LEVELS, paths, strict=True):
        _compile(level, path)
    return paths


def load_best() -> ctypes.CDLL:
    """Returns the kernels for the best of ``native_levels`` that the compiler supports: an old compiler does
    not support all instructions. Raises ``NoNativeKernels`` if no level can be compiled."""
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
    """Returns the kernels for ``level``. The first call on a machine compiles them, which takes a few
    seconds. Raises ``NoNativeKernels`` if that fails."""
    path = compiled_ahead(level) or _library_path(level)
    if not path.exists():
        _compile(level, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNativeKernels(f"{path} cannot be loaded: {error}") from error


def _library_path(level: str) -> Path:
    made_by = [*compiler(), *_options(level), _run([*compiler(), "--version"])]  # not the sources' path
    return library_folder() / _file_name(level, made_by)


def library_folder() -> Path:
    """Returns the folder of the libraries that are compiled on this machine."""
    cache = os.environ.get("AGENTFLOW_CACHE") or user_cache_dir("agentflow")
    return Path(cache).expanduser() / "kernels"


def _ahead_name(level: str) -> str:
    return _file_name(level, _options(level))  # without the compiler, which may not be installed


def _file_name(level: str, made_by: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(" ".join(made_by).encode())
    return f"{level}-{digest.hexdigest()[:16]}.so"


@functools.cache
def compiler() -> tuple[str, ...]:
    """Returns the command of the C++ compiler. Raises ``NoNativeKernels`` if there is none."""
    named = os.environ.get("CXX")
    if named:
        return tuple(shlex.split(named))
    for name in COMPILERS:
        if found := shutil.which(name):
            return (found,)
    raise NoNativeKernels(f"there is no C++ compiler ({', '.join(COMPILERS)})")


def _command(level: str) -> list[str]:
    return [*compiler(), *_options(level), str(SOURCES / "entry.cpp")]


def _options(level: str) -> list[str]:
    # AMX instructions are inline assembly: the compiler need not support them.
    options = [f"-m{name.replace('_', '')}" for name in LEVELS[level] if not name.startswith("amx")]
    if level == "amx":
        options.append("-DAGENTFLOW_TILES")
    return [*FLAGS, *options]


def _compile(level: str, path: Path) -> None:
    """Compiles the library. Uses a temporary name first, because other processes may look for the library. If
    several processes need it, one compiles and the others wait."""
    logger.info("compiling the native kernels for %s (once on this machine, a few seconds)", level)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if path.exists():
                return
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                _run([*_command(level), "-o", str(made)])
                made.replace(path)
    except OSError as error:
        raise NoNativeKernels(f"the library cannot be written to {path.parent}: {error}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder, so that no lock file remains. The system unlocks it if the process dies."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernels(f"the compiler cannot be run: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CompilerFails(f"the compiler failed: {errors[0] if errors else done.stderr.strip()}")
    return done.stdout
