"""The folder with the images of a recording."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import observed_backends
from support.observed_backends import Observed

import agentflow as af
from agentflow.protocol import ops
from agentflow.recording import images
from agentflow.recording.file import read_recording
from agentflow.recording.images import RecordedImages, images_folder, read_image

pytestmark = pytest.mark.anyio

PICTURE = b"\x89PNG\r\n\x1a\n of a recording"


def source_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parts(data: bytes, size: int) -> list[ops.Upload]:
    return [
        ops.Upload(source_of(data), len(data), at, data[at : at + size]) for at in range(0, len(data), size)
    ]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_images_have_the_permissions_of_the_recording(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.jsonl"
    written = RecordedImages(str(path), mode)
    for op in parts(PICTURE, 7):
        written.add(op)
    written.close()
    folder = images_folder(path)
    (file,) = folder.iterdir()
    assert file.read_bytes() == PICTURE
    assert file.stat().st_mode & 0o777 == mode
    assert folder.stat().st_mode & 0o777 == {0o600: 0o700, 0o640: 0o750, 0o644: 0o755}[mode]


async def test_images_are_written_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    write = RecordedImages._write

    def noting(self: RecordedImages, op: ops.Upload) -> None:
        threads.add(threading.get_ident())
        write(self, op)

    monkeypatch.setattr(RecordedImages, "_write", noting)
    path = tmp_path / "run.jsonl"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    async with (
        af.session(backend=af.Scripted("a"), record=path) as flow,
        flow.state() as s,
    ):
        s += af.user(af.image(PICTURE), af.video(b"\x00\x00\x00\x18ftypmp42"))
        await s
    assert threads
    assert threading.get_ident() not in threads
    kept = sorted(images_folder(path).iterdir())
    assert len(kept) == 2
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o600}
    found = read_image(path, source_of(b"\x00\x00\x00\x18ftypmp42"))
    assert found is not None
    assert found.is_video


def test_the_session_waits_when_much_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_WAITING_BYTES", 10)
    written = RecordedImages(str(tmp_path / "run.jsonl"), 0o600)
    for op in parts(PICTURE, 6):
        written.add(op)
        assert written._num_waiting <= 10
    written.close()
    found = read_image(tmp_path / "run.jsonl", source_of(PICTURE))
    assert found is not None
    assert found.data == PICTURE


def test_a_damaged_image_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written = RecordedImages(str(path), 0o600)
    for op in parts(PICTURE, 100):
        written.add(op)
    written.close()
    (file,) = images_folder(path).iterdir()
    file.write_bytes(PICTURE[:-1])
    assert read_image(path, source_of(PICTURE)) is None
    assert read_image(path, "sha256:../../etc/passwd") is None
    assert read_image(path, source_of(b"another")) is None


async def test_ops_that_are_refused_are_recorded_without_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(connection: object, sent: Sequence[ops.Op]) -> None:
        raise af.Overloaded("full")

    path = tmp_path / "run.jsonl"
    async with af.session(backend=Observed(af.Scripted("a")), record=path) as flow, flow.state() as s:
        with monkeypatch.context() as patched:
            patched.setattr(observed_backends._ObservedConnection, "send", refuse)
            with pytest.raises(af.Overloaded):
                s += af.user(af.image(PICTURE + bytes(10_000)))
    refused = [op for entry in read_recording(path).entries for op in entry.ops]
    assert [op.data for op in refused if isinstance(op, ops.Upload)] == [b""]
