"""Fixtures and settings that all tests share. Nothing heavy is imported here."""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from support.wire_server import ThreadServer

# Before anything imports torch or transformers: two threads (the machine of the CI has two cores, and
# tests run next to other work), and no access to a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other work runs on the same cores
os.environ["HF_HUB_OFFLINE"] = "1"
# Containers often forbid it: hundreds of child processes, and each worker, would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Only ``make gpu-test`` uses a GPU. Elsewhere torch finds none, engines without a device run on the CPU, and
# Triton's interpreter runs the kernels for GPUs.
if os.environ.get("AGENTFLOW_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Ray ends a process, without a word, a minute after a cluster to which it was connected has gone, if a call
# is left: in a test that has nothing to do with it.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
# The folder ``tests/kernels`` is not the package of that name, for whose version transformers would read the
# metadata of all distributions.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
# Tests compute in the event loop, and would be warned of it.
os.environ.setdefault("AGENTFLOW_BLOCKING_MS", "0")

# A shell ignores SIGINT in background commands, and children would inherit that: tests that
# interrupt something must mean the same there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports leave little garbage, and looking for it takes a tenth of the time of a collection of all tests.
gc.disable()

# The same examples in every run, so that a red run can be repeated; HYPOTHESIS_PROFILE=thorough searches
# for new ones. `make test-full` has six times as many.
settings.register_profile("agentflow", deadline=None, derandomize=True, max_examples=16)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "agentflow"))
if settings.default.derandomize:
    # Some values would be drawn from the constants of all imported modules, so that examples depend on the
    # tests that ran before; and to look through these after each import takes longer than most tests.
    providers._get_local_constants = lambda: providers._local_constants


ASYNCIO_FIRST = tuple(
    os.sep.join((os.path.dirname(__file__), *name.split("/"), ""))
    for name in (
        "backends",
        "cli",
        "engine/constrained",
        "engine/generator",
        "engine/media",
        "engine/models",
        "engine/simulator",
        "examples",
        "language",
        "protocol",
        "recording",
        "server",
    )
)
"""Folders whose tests run on trio in ``make test-full`` only: nearly all show values and messages, and the
server runs on asyncio. Those of connections, cancellation, races and task groups are marked ``on_trio``."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks which parameters marks give
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generates no tests on trio, a third of all tests, if ``make test`` leaves them out."""
    test = metafunc.definition
    if (
        "not full" in metafunc.config.option.markexpr
        and "anyio_backend" in metafunc.fixturenames
        and not hasattr(metafunc.module, "anyio_backend")
        and not any("anyio_backend" in mark.args[0] for mark in test.iter_markers("parametrize"))
        and (_is_on_asyncio_first(test) or test.get_closest_marker("trio_in_full"))
    ):
        test.add_marker(pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True), append=False)


def _is_on_asyncio_first(test: pytest.Item) -> bool:
    return str(test.path).startswith(ASYNCIO_FIRST) and not test.get_closest_marker("on_trio")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as ``full`` the tests on trio that ``make test`` leaves out, and as ``model`` the tests of the
    default model. Tests of its server have time for its start, minutes on a busy machine: if the start
    failed in one, it would fail in all."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if not {"model_folder", "model_url"}.isdisjoint(fixtures):
            item.add_marker(pytest.mark.model)
        if "model_url" in fixtures and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
        params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        if not params or "trio" not in params.values():
            continue
        is_in_full = params.get("anyio_backend") == "trio" and _is_on_asyncio_first(item)
        if is_in_full or item.get_closest_marker("trio_in_full"):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Makes imported modules faster, excludes them from garbage collections, which many tests run, and lets
    torch's loggers propagate."""
    from support.quick_torch import quicken_seeds
    from support.quick_triton import quicken_triton

    quicken_triton()
    quicken_seeds()
    # pytest adds and removes its handlers at each logger that propagates to none, six times a test.
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True
    gc.freeze()  # the little garbage of imports, too: to look for it takes as long as some hundred tests
    gc.enable()


# A test that hangs

GRACE_S = 60.0
"""The time that a test has after its time-out to end its tasks."""


class _Limits:
    """Ends the running test, besides pytest-timeout. A debugger lifts it."""

    def __init__(self, item: pytest.Item) -> None:
        option, marker = item.config.getoption("timeout"), item.get_closest_marker("timeout")
        timeout_s = (
            float(marker.args[0] if marker else item.config.getini("timeout") if option is None else option)
            or math.inf
        )
        self.item = item
        self.cancels_at = time.monotonic() + 0.9 * timeout_s
        self.ends_at = time.monotonic() + timeout_s + GRACE_S
        self.scope: anyio.CancelScope | None = None

    def lift(self) -> None:
        self.cancels_at = self.ends_at = math.inf
        if self.scope is not None:
            self.scope.deadline = math.inf


_limits: _Limits | None = None
_between_looks = threading.Event()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Ends the process if a test runs on for long after its time-out, at which pytest-timeout raises. Also
    restores agentflow's logs, on which other tests look, and excludes a file's leftovers, such as the reports
    of its tests, from later garbage collections."""
    global _limits
    if _limits is None:
        threading.Thread(target=_watch, name="time-outs", daemon=True).start()
    _limits = _Limits(item)
    logger = logging.getLogger("agentflow")
    handlers, propagates, level = logger.handlers[:], logger.propagate, logger.level
    try:
        return (yield)
    finally:
        _limits.ends_at = math.inf
        logger.handlers[:], logger.propagate = handlers, propagates
        if logger.level != level:
            logger.setLevel(level)
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def _watch() -> None:
    while not _between_looks.wait(5.0):
        if _limits is not None and time.monotonic() >= _limits.ends_at:
            _end_process(_limits.item)


def pytest_enter_pdb() -> None:
    """A debugger holds the test, which has no limit from then on."""
    if _limits is not None:
        _limits.lift()


def _end_process(item: pytest.Item) -> None:
    """pytest-xdist then reports the test as failed."""
    import psutil
    from pytest_timeout import is_debugging

    if is_debugging():
        return
    item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    print(f"\n{item.nodeid} runs on after its time-out", file=sys.stderr)
    faulthandler.dump_traceback()
    for child in psutil.Process().children(recursive=True):  # such as the servers of fixtures
        child.kill()
    os._exit(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that share a server run in one worker, so that it starts once."""
    if config.option.dist != "loadfile":
        return None
    from support.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Prints how a worker of pytest-xdist ended in the middle of a test: by a signal, or by an exit in native
    code, which no fault handler sees."""
    if error is None:
        return
    from agentflow.engine.machine.child_process import exit_phrase

    try:
        how = exit_phrase(node.gateway._io.popen.wait(10))
    except subprocess.TimeoutExpired:
        how = "has closed its connection and runs on"
    print(f"\nthe worker {node.gateway.id} {how}", file=sys.stderr)


@pytest.hookimpl(tryfirst=True)  # before anyio runs it
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Cancels an asynchronous test shortly before its time-out. pytest-timeout's exception comes out of the
    event loop and not out of the test; on trio, anyio would then wait for the end of the test forever."""
    test = pyfuncitem.obj
    if hasattr(test, "hypothesis"):
        inner = test.hypothesis.inner_test
        inner = getattr(inner, "_anyio_original_func", inner)  # the function has run on the other event loop
        if iscoroutinefunction(inner) and not hasattr(inner, "is_cancelled_in_time"):
            test.hypothesis.inner_test = _cancelled_in_time(inner)
    elif iscoroutinefunction(test):
        pyfuncitem.obj = _cancelled_in_time(test)


def _cancelled_in_time(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(**arguments: object) -> None:
        assert _limits is not None
        with anyio.fail_after(_limits.cancels_at - time.monotonic()) as scope:
            _limits.scope = scope
            try:
                await test(**arguments)
            except anyio.get_cancelled_exc_class() as end:
                if scope.cancel_called:
                    raise TimeoutError("the test was cancelled shortly before its time-out") from end
                raise

    run.is_cancelled_in_time = True  # type: ignore[attr-defined]
    return run


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Tests marked ``anyio`` run on both event loops, unless their file overrides this fixture."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _http_clients() -> None:
    """All HTTP clients share a context: to create one takes longer than several requests. And they wait until
    the test ends where they would wait for 5 s by default: a busy machine may take longer."""
    import httpcore2
    from httpx2._config import DEFAULT_TIMEOUT_CONFIG as DEFAULT

    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
    DEFAULT.connect = DEFAULT.read = DEFAULT.write = DEFAULT.pool = None


@pytest.fixture(scope="module", autouse=True)
def _unchanged_process() -> Iterator[None]:
    """Fails if a file of tests changes the settings of the process."""
    if sys.platform != "linux":
        yield
        return
    from support.process_state import changed, process_state

    before, torch = process_state(), sys.modules.get("torch")
    num_threads = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != num_threads:  # an engine in this process has its own
        torch.set_num_threads(num_threads)
    assert not changed(before)


@pytest.fixture(scope="module", autouse=True)
def _prompt_compiling() -> Iterator[None]:
    """Constraints are compiled at the priority of the tests."""
    from agentflow.engine.grammar.compiler.worker_handle import CompileWorkerHandle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompileWorkerHandle, "module", "support.compile_worker")
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> Iterator[None]:
    """The processes of engines and of the compiler are forks of a process that has their modules."""
    from support.process_template import forked_processes

    with forked_processes():
        yield


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model's folder in the user's own store; the first test that asks for it pulls it."""
    from agentflow.engine.store.model_store import pull_model
    from agentflow.protocol.wire import DEFAULT_MODEL

    return pull_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def model_url(model_folder: Path) -> Iterator[str]:
    """The address of a server on the default model, for all tests that need nothing special of it. It
    computes in float32: other batches, and an embedded engine, then give the same tokens."""
    from support.commands import served

    with served("--dtype", "float32", "--kv-tokens", "6000", "--threads", "1") as (url, _):
        yield url


@pytest.fixture(scope="session")
def server() -> Iterator[ThreadServer]:
    """A server on the scripted backend for the tests that need one with the default limits. It waits 60 s for
    a client whose connection is broken, longer than any test takes to resume."""
    from support.wire_server import thread_server

    from agentflow.server.config.limits import ServerLimits

    with thread_server(ServerLimits(resume_grace_s=60.0)) as running:
        yield running
