"""The tests that a worker of pytest-xdist runs one after the other: the tests of a file, or of all files that
share a server."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
FOLDERS, SHARED = ("tests/end_to_end", "tests/examples"), "model_url"
"""The folders whose files share a server, and the fixture that starts it."""


class FileScheduling(LoadFileScheduling):
    """``--dist loadfile``, which knows these files."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SHARED if file in self._sharing else file

    @cached_property
    def _sharing(self) -> set[str]:
        files = [path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py")]
        return {path.relative_to(ROOT).as_posix() for path in files if SHARED in path.read_text()}
