"""The walk of one generation through the code: the files that it enters, and the moves between them.

``PYTHONPATH=.:tests python -m support.walk`` runs one ``s += af.gen(...)`` on the fake engine, from its
append to its value, and prints the files in the order of their first call. A *move* is a call from one file
to another, in any thread. Everything is warm: the program has run once before.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from support.fake_engine import FakeEngine
from support.plain_model import runner

import agentflow as af

PACKAGE = str(Path(af.__file__).parent)


class Walk:
    """Counts calls between files of the package while it is open, in the threads that ``follow`` was called
    in."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # in the order of their first call
        self.calls: list[tuple[str, str]] = []  # the file and the function of each
        self.moves: Counter[tuple[str, str]] = Counter()
        self.is_open = False

    def follow(self, *_: object) -> None:
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_open or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename
        self.files.setdefault(file)
        self.calls.append((file, frame.f_code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.moves[caller.f_code.co_filename, file] += 1


async def generation() -> Walk:
    """The walk of a program with one generation of one token."""
    walk = Walk()
    walk.follow()
    async with af.session(backend=FakeEngine(runner=runner(on_step=walk.follow))) as flow:
        state = flow.state()
        state += "Warm: "
        state += af.gen("warm", max_tokens=1)
        await state
        await flow.stats()  # the engine has done all that the first generation left
        await anyio.wait_all_tasks_blocked()
        walk.is_open = True
        state += af.gen("answer", max_tokens=1)
        await state["answer"]
        walk.is_open = False
    sys.setprofile(None)
    return walk


def main() -> None:
    walk = anyio.run(generation)
    for file in walk.files:
        print(Path(file).relative_to(PACKAGE))
    print(f"\n{len(walk.files)} files, {sum(walk.moves.values())} moves between them")


if __name__ == "__main__":
    main()
