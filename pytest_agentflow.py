"""A pytest plugin for programs of agentflow, with two fixtures for tests without a model.

``agentflow_scripted(script)`` answers from a script, ``agentflow_replay`` from a recording of the test, which
``pytest --agentflow-record`` makes. In a test with one of them, every session that is opened without a
``backend`` gets its answers there, whatever its url or model.

pytest imports this module in every run of an environment that has agentflow. So it stands outside of the
package, whose import takes longer, and imports agentflow only in the fixtures. The option is not named
``--record``, because all plugins of pytest share one namespace of options, and others record too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import agentflow as af
    from agentflow.backends.open_session import Substitute
    from agentflow.protocol.backend import Backend

_HAS_FAILED = pytest.StashKey[bool]()
_CASSETTE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("agentflow").addoption(
        "--agentflow-record",
        action="store_true",
        help="run the tests that use agentflow_replay on a real backend, and record them",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Adds to the report of a failed replay how to record the test again."""
    report: pytest.TestReport = (yield).get_result()
    if report.when == "call":
        item.stash[_HAS_FAILED] = report.failed
        if report.failed and _CASSETTE in item.stash and item.stash[_CASSETTE].exists():
            report.sections.append(("agentflow", f"{item.stash[_CASSETTE]} was replayed. {_advice(item)}"))


@pytest.fixture
def agentflow_scripted(request: pytest.FixtureRequest) -> Iterator[Callable[..., af.Scripted]]:
    """``agentflow_scripted(script)`` returns an ``af.Scripted``, which answers the sessions that this test
    opens from then on. With ``strict=True``, the default, the test fails if answers are unused at its end."""
    import agentflow as af
    from agentflow.backends.open_session import substituted

    made: list[tuple[af.Scripted, bool]] = []

    def scripted(script: Any, *, strict: bool = True) -> af.Scripted:
        made.append((af.Scripted(script), strict))
        return made[-1][0]

    def substitute(_: Callable[[], Backend]) -> tuple[Backend, None]:
        if not made:
            pytest.fail("a session was opened before agentflow_scripted(…) was called", pytrace=False)
        return made[-1][0], None

    with substituted(substitute):
        yield scripted
    if not request.node.stash.get(_HAS_FAILED, False):
        unused = ""
        try:
            for backend, is_strict in made:
                if is_strict:
                    backend.check_used()
        except af.errors.ScriptMismatch as error:
            unused = str(error)
        if unused:  # outside the handler, so that the report shows no other exception
            pytest.fail(unused, pytrace=False)


@pytest.fixture
def agentflow_backend() -> Backend | None:
    """The backend that ``agentflow_replay`` records. None: a server or the embedded engine, as the sessions
    of the test choose. For another one, override this fixture in a conftest.py."""
    return None


@pytest.fixture
def agentflow_replay(request: pytest.FixtureRequest, agentflow_backend: Backend | None) -> Iterator[Path]:
    """Answers the sessions of this test from recordings, or with ``--agentflow-record`` makes them. The
    recording of the first session is ``cassettes/MODULE/TEST.jsonl`` beside the test's file, and the value of
    the fixture; that of the second is ``TEST-2.jsonl``. Where the name of the test has characters that a file
    name cannot have, or capitals in its parameters, ``~`` and a digest follow it."""
    from agentflow.backends.open_session import substituted

    first = _cassette_of(request.node)
    used: list[Path] = []
    is_recording = request.config.getoption("--agentflow-record")
    if is_recording:
        substitute = _recording(first, agentflow_backend, used)
    else:
        request.node.stash[_CASSETTE] = first
        substitute = _replaying(first, request.node)
    with substituted(substitute):
        yield first
    if is_recording and not request.node.stash.get(_HAS_FAILED, True):
        _remove_unused(first, used)


def _recording(first: Path, backend: Backend | None, used: list[Path]) -> Substitute:
    first.parent.mkdir(parents=True, exist_ok=True)
    paths = _numbered(first)

    def substitute(chosen: Callable[[], Backend]) -> tuple[Backend, Path]:
        used.append(next(paths))
        return backend or chosen(), used[-1]

    return substitute


def _remove_unused(first: Path, used: list[Path]) -> None:
    for path in [first, *first.parent.glob(f"{_literal(first.stem)}-[0-9]*.jsonl")]:
        if path not in used:
            path.unlink(missing_ok=True)


def _replaying(first: Path, item: pytest.Item) -> Substitute:
    import agentflow as af

    paths = _numbered(first)

    def substitute(_: Callable[[], Backend]) -> tuple[Backend, None]:
        path = next(paths)
        if not path.exists():
            # Not an error of agentflow, which the program under test might handle.
            pytest.fail(f"there is no recording {path}. {_advice(item)}", pytrace=False)
        return af.Replay(path), None

    return substitute


def _advice(item: pytest.Item) -> str:
    return f"Record it on a model with:\n    pytest --agentflow-record '{item.nodeid}'"


_MAX_NAME_CHARS = 120


def _cassette_of(item: pytest.Item) -> Path:
    """The path of a test's first recording. A name that has to change, or that differs from another one only
    in its case, ends with a digest of the test's id, so that no two tests share a recording."""
    test = item.nodeid.partition("::")[2]
    function, bracket, parameters = test.partition("[")
    function = function.replace("::", ".")
    name = re.sub(r"[^A-Za-z0-9_.\[\]-]+", "-", function + bracket + parameters)
    if len(name) > _MAX_NAME_CHARS or name != function + bracket + parameters.lower():
        digest = hashlib.blake2b(test.encode(errors="surrogatepass"), digest_size=4).hexdigest()
        name = f"{name[:_MAX_NAME_CHARS]}~{digest}"
    return item.path.parent / "cassettes" / item.path.stem / f"{name}.jsonl"


def _literal(name: str) -> str:
    return name.replace("[", "[[]")


def _numbered(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_stem(f"{first.stem}-{number}")
        number += 1
