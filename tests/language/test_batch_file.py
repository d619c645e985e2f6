"""The file of a map's batches on a disk that is full for a while."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.language.batch.batches import BatchFile
from agentflow.protocol.batches import BatchRecord
from agentflow.runtime import locked_file

TAGS = st.sampled_from(["a", "b", "c"])
WRITES = st.lists(st.tuples(TAGS, st.none() | st.integers(0, 300)), max_size=12)


@given(writes=WRITES)
def test_f37_a_full_disk_loses_no_record_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, writes: Sequence[tuple[str, int | None]]
) -> None:
    """A write with a number fails after this number of bytes."""
    path = str(tmp_path_factory.mktemp("map") / "results.jsonl")
    kept: dict[str, BatchRecord] = {}
    with pytest.MonkeyPatch.context() as patch:
        file = BatchFile(path, "p", begins=True)
        for number, (tag, room) in enumerate(writes):
            known = kept.get(tag)
            requests = known.requests if known else (f"r{number}",) * 20
            sent_at = known.sent_at if known else float(number)
            record = BatchRecord(tag, requests, sent_at, batch=f"batch-{number}")
            patch.setattr(locked_file, "os", os if room is None else FullDisk(room))
            try:
                file.add(record)
            except OSError:
                assert room is not None
            else:
                kept[tag] = record
        patch.undo()
        file.close()
    reopened = BatchFile(path, "p", begins=False)
    assert {record.tag: record for record in reopened.records()} == kept
    reopened.close()
    assert Path(path + ".batches").exists()


class FullDisk:
    """``os`` with room for some more bytes in all files."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        """Writes the part for which there is room."""
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self._room])
        self._room -= written
        return written
