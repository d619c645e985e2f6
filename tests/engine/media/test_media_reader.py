"""Reading media in processes: failures stay with one image, and prepared media are kept and shared."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from PIL import Image as Pictures
from support.processes import signal_child

from agentflow.engine.media import reader as reader_module
from agentflow.engine.media.messages import MediaLimits, ReadMedium
from agentflow.engine.media.reader import MAX_FETCHED, MediaReader, media_reader
from agentflow.engine.media.settings import PixelScaling, pixel_scaling
from agentflow.engine.media.worker_handle import MediaWorkerHandle
from agentflow.engine.media_run import MediaPiece, PreparedMedium
from agentflow.errors import BadArgument, BadModelFolder, EngineFailed, NotSupported, Overloaded
from agentflow.protocol.images import Image, MediumKind, Video, image_file
from agentflow.runtime.task_group import open_task_group
from tests.support.media_files import bomb, encoded, noise, video

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CONFIG = {
    "model_type": "llava_next_video",
    "vision_config": {"model_type": "clip_vision_model", "patch_size": 7},
    "text_config": {"vocab_size": 1},
}
PREPROCESSOR = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_grid_pinpoints": [[28, 56], [56, 28]],
    "image_mean": [0.1, 0.2, 0.3],
}


def _folder(path: Path, **files: Any) -> Path:
    for name, content in {"config": CONFIG, "preprocessor_config": PREPROCESSOR, **files}.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


@asynccontextmanager
async def _reader(path: Path, **limits: Any) -> AsyncIterator[MediaReader]:
    reader = media_reader(_folder(path), MediaLimits(**limits))
    assert reader is not None
    try:
        yield reader
    finally:
        await reader.aclose()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ReadMedium]]:
    """The process and the medium of each that was read in a process."""
    found: list[tuple[int, ReadMedium]] = []
    read = MediaWorkerHandle.read

    async def observed(self: MediaWorkerHandle, medium: ReadMedium, data: bytes) -> PreparedMedium:
        found.append((self.pid, medium))
        return await read(self, medium, data)

    monkeypatch.setattr(MediaWorkerHandle, "read", observed)
    return found


def _image(seed: int = 0, height: int = 20, width: int = 40, kind: str = "PNG") -> Image:
    return image_file(encoded(noise(height, width, seed), kind))


async def test_an_image_becomes_arrays_and_pieces(tmp_path: Path) -> None:
    async with _reader(tmp_path) as reader:
        medium = await reader.read_image(_image())
        assert (reader.image_token, reader.video_token) == ("<image>", "<video>")
    assert medium.arrays["pixels"].shape == (3, 3, 28, 28)
    assert medium.arrays["sizes"].tolist() == [20, 40]
    (piece,) = medium.pieces
    assert isinstance(piece, MediaPiece)
    assert piece.positions.tolist() == [list(range(4 * 4 + 4 * 9))]
    assert len(medium.identity) == 64


async def test_identities_are_those_of_pixels_and_settings(tmp_path: Path) -> None:
    async with _reader(tmp_path) as reader:
        first = await reader.read_image(_image())
        same = await reader.read_image(_image(kind="WEBP", seed=1))
        other = image_file(encoded(noise(20, 40), "PNG", compress_level=1))
        again = await reader.read_image(other)
    assert first.identity == again.identity != same.identity
    (tmp_path / "other").mkdir()
    changed = _folder(tmp_path / "other", preprocessor_config={**PREPROCESSOR, "image_std": [1, 1, 1]})
    reader = media_reader(changed) or pytest.fail("it reads images")
    with_other_scaling = await reader.read_image(_image())
    await reader.aclose()
    np.testing.assert_array_equal(with_other_scaling.arrays["pixels"], first.arrays["pixels"])
    assert with_other_scaling.identity != first.identity


async def test_a_bad_image_harms_neither_the_process_nor_others(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    hostile = [bomb(), encoded(noise(90, 90))[:-2_000], b"\xff\xd8\xff" + bytes(100)]
    async with _reader(tmp_path, num_processes=1) as reader:
        for data in hostile:
            with pytest.raises(BadArgument) as raised:
                await reader.read_image(image_file(data))
            assert raised.value.param == "image"
        await reader.read_image(_image())
    assert len({pid for pid, _ in jobs}) == 1


async def test_memory_of_an_image_is_bounded(tmp_path: Path) -> None:
    async with _reader(tmp_path, memory_bytes=60_000_000) as reader:
        with pytest.raises(BadArgument) as raised:
            await reader.read_image(_large())
        assert "memory" in str(raised.value)
        await reader.read_image(_image())


@functools.cache
def _large() -> Image:
    return image_file(encoded(Pictures.new("RGB", (5_000, 5_000))))


async def test_time_of_an_image_is_bounded(tmp_path: Path) -> None:
    async with _reader(tmp_path, image_cpu_s=0.01, wall_s=6_000) as reader:
        with pytest.raises(BadArgument) as raised:
            await reader.read_image(_large())
    assert "time" in str(raised.value)


async def test_bytes_for_the_model_are_bounded(tmp_path: Path) -> None:
    async with _reader(tmp_path, prepared_bytes=1_000) as reader:
        with pytest.raises(BadArgument):
            await reader.read_image(_image())


async def test_a_process_that_dies_fails_only_its_image(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    async with _reader(tmp_path, num_processes=1) as reader:
        await reader.read_image(_image(0))
        signal_child(jobs[0][0], signal.SIGSTOP)
        signal_child(jobs[0][0], signal.SIGSEGV)  # it gets this one when it goes on
        with pytest.raises(BadArgument):  # noqa: PT012  the group raises it
            async with open_task_group() as group:
                group.start_soon(reader.read_image, _image(1))
                await anyio.wait_all_tasks_blocked()
                signal_child(jobs[0][0], signal.SIGCONT)
        await reader.read_image(_image(2))


async def test_an_image_is_read_again_if_its_process_was_killed(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    async with _reader(tmp_path, num_processes=1) as reader:
        await reader.read_image(_image(0))
        signal_child(jobs[0][0], signal.SIGKILL)
        await reader.read_image(_image(1))
    assert len({pid for pid, _ in jobs}) == 2


async def test_a_process_that_hangs_fails_only_its_image(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    async with _reader(tmp_path, num_processes=1) as reader:
        await reader.read_image(_image(0))
        signal_child(jobs[0][0], signal.SIGSTOP)
        patient, reader._limits = reader._limits, MediaLimits(num_processes=1, wall_s=0.001)
        with pytest.raises(Overloaded):
            await reader.read_image(_image(1))
        reader._limits = patient  # a busy machine may take long for the others
        await reader.read_image(_image(2))


async def test_equal_images_are_read_once(tmp_path: Path, jobs: list[tuple[int, ReadMedium]]) -> None:
    found: list[PreparedMedium] = []

    async def read() -> None:
        found.append(await reader.read_image(_image()))

    async with _reader(tmp_path) as reader:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(read)
        await read()
    assert len(jobs) == 1
    assert len({id(medium) for medium in found}) == 1


async def test_tenants_share_nothing(tmp_path: Path, jobs: list[tuple[int, ReadMedium]]) -> None:
    async with _reader(tmp_path) as reader:
        first = await reader.read_image(_image(), tenant="ann")
        second = await reader.read_image(_image(), tenant="bob")
    assert len(jobs) == 2
    assert first.identity == second.identity


async def test_one_tenant_leaves_a_process_to_others(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    async with _reader(tmp_path, num_processes=2) as reader:
        await reader.read_image(_image(0), tenant="ann")
        stopped = jobs[0][0]
        signal_child(stopped, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            for seed in range(1, 5):
                group.start_soon(partial(reader.read_image, _image(seed), tenant="ann"))
            await anyio.wait_all_tasks_blocked()
            await reader.read_image(_image(0), tenant="bob")
            assert len(jobs) == 3
            signal_child(stopped, signal.SIGCONT)
        assert len(jobs) == 6


@pytest.mark.parametrize("slow_s", [0.0, 1_000.0])
async def test_slow_tenants_together_leave_a_process_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    monkeypatch.setattr(reader_module, "SLOW_S", slow_s)
    held: list[int] = []
    one_is, both_are, go_on = anyio.Event(), anyio.Event(), anyio.Event()
    read = MediaWorkerHandle.read

    async def hold(self: MediaWorkerHandle, medium: ReadMedium, data: bytes) -> PreparedMedium:
        if data in (large.data, larger.data):
            held.append(self.pid)
            (both_are if one_is.is_set() else one_is).set()
            await go_on.wait()
        return await read(self, medium, data)

    large, larger = _image(width=100), _image(width=200)
    monkeypatch.setattr(MediaWorkerHandle, "read", hold)
    async with _reader(tmp_path, num_processes=2) as reader:
        await reader.read_image(_image(0), tenant="ann")
        await reader.read_image(_image(0), tenant="bob")
        async with anyio.create_task_group() as group:
            group.start_soon(partial(reader.read_image, large, tenant="ann"))
            group.start_soon(partial(reader.read_image, larger, tenant="bob"))
            if slow_s:  # and if they were not known as slow before, they soon do not count any more
                await both_are.wait()
                monkeypatch.setattr(reader_module, "PATIENCE_S", 0.01)
                await reader.read_image(_image(0), tenant="eve")
                assert reader._num_late == 1
            else:
                await one_is.wait()
                await reader.read_image(_image(0), tenant="eve")
                assert len(held) == 1
            go_on.set()
        assert (reader._num_late, reader._turns.value, len(reader._idle)) == (0, 2, 2)


async def test_a_medium_in_vain_counts_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SLOW_S", 0.005)
    async with _reader(tmp_path, image_cpu_s=0.01, wall_s=6_000) as reader:
        with pytest.raises(BadArgument):
            await reader.read_image(_large(), tenant="ann")
        assert list(reader._slow_until) == ["ann"]


async def test_fetched_images_wait_with_few_bytes(tmp_path: Path) -> None:
    fetched: list[str] = []

    async def fetch(url: str, kind: MediumKind, tenant: str) -> Image:
        fetched.append(url)
        return _image(len(fetched))

    reader = media_reader(_folder(tmp_path), fetch=fetch) or pytest.fail("it reads images")
    async with reader._turns, reader._turns, reader._turns, anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(partial(reader.read_image, Image(f"https://example.org/{number}"), tenant="ann"))
        await anyio.wait_all_tasks_blocked()
        assert len(fetched) == MAX_FETCHED
        group.cancel_scope.cancel()
    await reader.read_image(Image("https://example.org/x"), tenant="ann")
    await reader.aclose()


async def test_a_process_can_be_started_before_the_first_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _reader(tmp_path) as reader:
        await reader.warm_up()
        monkeypatch.setattr(MediaWorkerHandle, "start", None)
        await reader.read_image(_image())


async def test_a_process_goes_on_loading_for_the_next_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[MediaWorkerHandle] = []
    ready = MediaWorkerHandle.ready

    async def observed(self: MediaWorkerHandle) -> None:
        workers.append(self)
        if len(workers) < 3:
            scope.cancel()
        await ready(self)

    monkeypatch.setattr(MediaWorkerHandle, "ready", observed)
    async with _reader(tmp_path) as reader:
        for _ in range(2):
            with anyio.CancelScope() as scope:
                await reader.read_image(_image())
        await reader.read_image(_image())
        assert workers == 3 * workers[:1]
        with anyio.CancelScope() as scope:
            workers.clear()
            await reader._start()
    assert workers[0].exit_code is not None


async def test_a_process_that_starts_during_the_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[MediaWorkerHandle] = []
    ready = MediaWorkerHandle.ready

    async def observed(self: MediaWorkerHandle) -> None:
        workers.append(self)
        await reader.aclose()
        await ready(self)

    monkeypatch.setattr(MediaWorkerHandle, "ready", observed)
    async with _reader(tmp_path) as reader:
        await reader.warm_up()
        assert [worker.exit_code is None for worker in workers] == [False]


async def test_a_cancelled_reader_leaves_the_image_to_the_next(tmp_path: Path) -> None:
    found: list[PreparedMedium] = []

    async def read(scope: anyio.CancelScope) -> None:
        with scope:
            found.append(await reader.read_image(_image()))

    async with _reader(tmp_path) as reader:
        first, second = anyio.CancelScope(), anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(read, first)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(read, second)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
        assert found
        assert all(one is found[0] for one in found)  # two: the first was done before it was cancelled
        await reader.read_image(_image(1))


async def test_prepared_media_are_kept_within_a_budget(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    each = 3 * 3 * 28 * 28 + 16
    async with _reader(tmp_path, cache_bytes=2 * each) as reader:
        for seed in (0, 1, 0, 2, 0, 1):  # the third replaces 1, which was used before 0
            await reader.read_image(_image(seed))
    assert len(jobs) == 4


def _clip(data: bytes, num_frames: int | None = None) -> Video:
    return Video(image_file(data, "video"), num_frames)


async def test_frames_of_a_video_become_one_medium(
    tmp_path: Path, jobs: list[tuple[int, ReadMedium]]
) -> None:
    data = video(20)
    async with _reader(tmp_path) as reader:
        medium = await reader.read_video(_clip(data, 8))
        assert (await reader.read_video(_clip(data, 8))) is medium
        assert (await reader.read_video(_clip(data, 32))).arrays["pixels"].shape[0] == 20
        url = Video(Image("https://example.org/x.mp4"))
        for wrong, param in (
            (_clip(data[:500], 8), "video"),
            (_clip(data, 0), "num_frames"),
            (_clip(data, 500), "num_frames"),
            (url, "video"),
        ):
            with pytest.raises(BadArgument) as raised:
                await reader.read_video(wrong)
            assert raised.value.param == param
            assert "\n" not in str(raised.value)
    assert medium.arrays["pixels"].shape == (8, 3, 28, 28)
    (piece,) = medium.pieces
    assert isinstance(piece, MediaPiece)
    assert len(piece.positions[0]) == 8 * 4
    assert len(jobs) == 3


async def test_an_url_is_no_file(tmp_path: Path) -> None:
    async with _reader(tmp_path) as reader:
        with pytest.raises(BadArgument) as raised:
            await reader.read_image(Image("https://example.org/x.png"))
    assert raised.value.param == "image"


async def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _reader(tmp_path) as reader:
        package = tmp_path / "without" / "PIL"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ModuleNotFoundError('none', name='PIL')")
        monkeypatch.syspath_prepend(package.parent)
        with pytest.raises(NotSupported) as raised:
            await reader.read_image(_image())
    assert "agentflow-lm[vision]" in str(raised.value)


async def test_without_its_decoder_a_model_reads_no_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "av" else find(name))
    async with _reader(tmp_path) as reader:
        assert (reader.image_token, reader.video_token) == ("<image>", "")
        with pytest.raises(BadArgument):
            await reader.read_video(_clip(video(4), 2))


async def test_nothing_is_read_after_the_end(tmp_path: Path) -> None:
    async with _reader(tmp_path) as reader:
        await reader.read_image(_image())
    with pytest.raises(EngineFailed):
        await reader.read_image(_image(1))


async def test_large_bytes_do_not_cross_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = threading.get_ident()
    threads: set[int] = set()
    for name in ("pwrite", "preadv"):
        real = getattr(os, name)

        def observed(*args: Any, real: Any = real) -> Any:
            threads.add(threading.get_ident())
            return real(*args)

        monkeypatch.setattr(os, name, observed)
    sent: list[int] = []
    send = MediaWorkerHandle.send

    async def counted(self: MediaWorkerHandle, frame: bytes) -> None:
        sent.append(len(frame))
        await send(self, frame)

    monkeypatch.setattr(MediaWorkerHandle, "send", counted)
    async with _reader(tmp_path) as reader:
        await reader.read_image(_image(height=500, width=500))
    assert threads
    assert loop not in threads
    assert max(sent) < 1_000


def test_models_without_images_have_no_reader(tmp_path: Path) -> None:
    assert media_reader(_folder(tmp_path, config={"model_type": "llama"})) is None
    (tmp_path / "preprocessor_config.json").unlink()
    assert media_reader(_folder(tmp_path, preprocessor_config=None)) is None


def test_settings_of_one_file_for_all_processors_are_read(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path,
        preprocessor_config=None,
        processor_config={"image_processor": PREPROCESSOR, "video_token": "<clip>"},
    )
    reader = media_reader(folder) or pytest.fail("it reads images")
    assert reader.video_token == "<clip>"
    assert reader.scaling == pixel_scaling(folder)


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        ({}, PixelScaling(1 / 255, (0.1, 0.2, 0.3), (0.26862954, 0.26130258, 0.27577711))),
        ({"do_normalize": False}, PixelScaling(1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))),
        ({"do_rescale": False, "image_std": [1, 2, 3]}, PixelScaling(1.0, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))),
        (
            {"rescale_factor": 0.5, "image_std": [1, 1, 1]},
            PixelScaling(0.5, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0)),
        ),
    ],
)
def test_scaling_is_read_from_the_files(
    tmp_path: Path, preprocessor: dict[str, Any], expected: PixelScaling
) -> None:
    folder = _folder(tmp_path, preprocessor_config={**PREPROCESSOR, **preprocessor})
    assert pixel_scaling(folder) == expected


@pytest.mark.parametrize(
    "preprocessor",
    [b"[]", b"{", b"\xff", b'{"image_mean": [1, 2]}', b'{"image_std": 3}', b'{"rescale_factor": "1"}'],
)
def test_damaged_settings_are_rejected(tmp_path: Path, preprocessor: bytes) -> None:
    folder = _folder(tmp_path)
    (folder / "preprocessor_config.json").write_bytes(preprocessor)
    with pytest.raises(BadModelFolder):
        pixel_scaling(folder)
