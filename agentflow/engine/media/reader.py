"""Reads images and videos for one model, on the event loop's side.

The files are decoded and prepared in processes that may fail (``worker_handle``). A tenant may use all
processes except one, and slow media together may use all except one. Slow media are videos, and the images of
a tenant that recently sent an image that took long. Prepared media are cached within a budget of bytes,
separately for each tenant, so that the time of a call reveals nothing about other tenants.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Generic, TypeVar

import anyio
import anyio.to_thread

from agentflow.engine.media.messages import MAX_SAMPLED_FRAMES, MediaLimits, ReadMedium
from agentflow.engine.media.processors.registry import PROCESSORS
from agentflow.engine.media.settings import MediaSettings, PixelScaling, read_media_settings
from agentflow.engine.media.worker_handle import Killed, MediaWorkerHandle
from agentflow.engine.media_run import PreparedMedium
from agentflow.errors import BadArgument, EngineFailed, NotSupported, Overloaded
from agentflow.protocol.images import Image, MediumKind, Video

logger = logging.getLogger(__name__)

LOAD_S: Final = 60.0
"""How long the start of a process may take."""
SLOW_S: Final = 2.0
"""An image that takes more processor time is slow. Photos of 50 megapixels take less."""
SLOW_FOR_S: Final = 300.0
"""How long the images of a tenant count as slow after a slow image."""
PATIENCE_S: Final = 2.0
"""If a medium waits longer for a process, a job that has also run longer loses its turn, and another process
starts. On a busy machine, ten seconds of processor time may take a minute."""
MAX_FETCHED: Final = 4
"""The most media of a tenant that are being fetched from URLs, or are fetched and not read yet."""

_Key = tuple[str, str, int]
"""The tenant, the source of the file, and the number of frames of a video; 0: the model's default."""


FetchImage = Callable[[str, MediumKind, str], Awaitable[Image]]
"""Returns the image, or the file of a video, at a URL, for a tenant. Raises ``BadArgument`` if the URL is not
allowed or has no such file."""


def media_reader(
    folder: Path, limits: MediaLimits | None = None, *, fetch: FetchImage | None = None
) -> MediaReader | None:
    """Returns the reader of a model; None if the model reads no images, or the extra ``vision`` is not
    installed.

    Args:
        folder: The files of the model.
        limits: The limits of reading.
        fetch: Fetches the files of URLs. None: URLs are rejected.

    Raises:
        BadModelFolder: The model's settings are damaged.
        NotSupported: The model has unsupported settings.
    """
    settings = read_media_settings(folder)
    if settings.family not in PROCESSORS or not settings.image:
        return None
    if importlib.util.find_spec("PIL") is None:
        logger.warning("%s reads no images: pip install 'agentflow-lm[vision]'", folder.name)
        return None
    return MediaReader(settings, limits or MediaLimits(), fetch)


@asynccontextmanager
async def open_reader(folder: Path, *, fetch: FetchImage | None = None) -> AsyncIterator[MediaReader | None]:
    """Yields the result of ``media_reader``, and ends the reader's processes afterwards. For a model with
    unsupported settings, logs a warning and yields None. Raises ``BadModelFolder`` if its settings are
    damaged."""
    try:
        reader = await anyio.to_thread.run_sync(partial(media_reader, folder, fetch=fetch))
    except NotSupported as error:
        logger.warning("%s reads no images: %s", folder.name, error)
        reader = None
    try:
        yield reader
    finally:
        if reader is not None:
            await reader.aclose()


KeyT = TypeVar("KeyT")


class KeyedSemaphores(Generic[KeyT]):
    """A semaphore for each key that is in use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used: dict[KeyT, tuple[anyio.Semaphore, int]] = {}

    @asynccontextmanager
    async def one(self, key: KeyT) -> AsyncIterator[None]:
        """Acquires the semaphore of the key."""
        turns, count = self._used.get(key, (anyio.Semaphore(self._size), 0))
        self._used[key] = turns, count + 1
        try:
            async with turns:
                yield
        finally:
            turns, count = self._used[key]
            self._used[key] = turns, count - 1
            if count == 1:
                del self._used[key]


@dataclass(slots=True)
class _Job:
    """A medium that a process is reading since ``began``. ``is_late``: its turn was given to another job."""

    began: float
    is_late: bool = False


class MediaReader:
    """Reads the media of one model. Made by ``media_reader``, for the event loop's thread.

    ``image_token``, ``video_token``: the text that a chat template writes for a medium, which the medium's
    pieces replace; empty: the model reads no such media, or a package is not installed.
    """

    def __init__(self, settings: MediaSettings, limits: MediaLimits, fetch: FetchImage | None = None) -> None:
        self._fetch = fetch
        processor = PROCESSORS[settings.family](settings)
        self.image_token = processor.image_token
        self.video_token = processor.video_token if importlib.util.find_spec("av") is not None else ""
        self._settings = settings
        self._limits = limits
        self._idle: list[MediaWorkerHandle] = []
        self._loading: list[MediaWorkerHandle] = []  # started for requests that were cancelled
        self._turns = anyio.Semaphore(limits.num_processes)
        self._turns_of = KeyedSemaphores[str](max(1, limits.num_processes - 1))
        self._slow_turns = anyio.Semaphore(max(1, limits.num_processes - 1))
        self._slow_until: dict[str, float] = {}  # by tenant
        self._jobs: list[_Job] = []  # oldest first
        self._num_late = 0
        self._fetched = KeyedSemaphores[str](MAX_FETCHED)
        self._kept: dict[_Key, PreparedMedium] = {}  # least recently used first
        self._kept_bytes = 0
        self._reading = KeyedSemaphores[_Key](1)
        self._is_closed = False

    @property
    def scaling(self) -> PixelScaling:
        """How the model's tower scales pixels."""
        return self._settings.scaling

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        """Returns the image as the model reads it. Equal images of a tenant are read once and cached; a URL
        is fetched at each call.

        Raises:
            BadArgument: the image is damaged, too large, in another format, or not a file.
            EngineFailed: the process that reads images failed.
            Overloaded: the machine is too busy.
        """
        if not image.is_file and self._fetch is not None:
            async with self._fetched.one(tenant):
                return await self.read_image(await self._fetch(image.source, "image", tenant), tenant=tenant)
        if not image.data:
            raise BadArgument(
                f"image: give the bytes of the image: this model does not fetch {image.source[:80]!r}",
                param="image",
            )
        medium = ReadMedium("image", len(image.data))
        return await self._read((tenant, image.source, 0), medium, image.data)

    async def read_video(self, video: Video, *, tenant: str = "") -> PreparedMedium:
        """Returns frames of a video as the model reads them; all frames if the video has fewer than
        ``num_frames``. Raises like ``read_image``."""
        if not self.video_token:
            raise BadArgument("video: this model reads no videos", param="video")
        num_frames = video.num_frames or 0
        if video.num_frames is not None and not 0 < num_frames <= MAX_SAMPLED_FRAMES:
            raise BadArgument(
                f"num_frames must be from 1 to {MAX_SAMPLED_FRAMES}, not {num_frames}", param="num_frames"
            )
        file = video.file
        if not file.is_file and self._fetch is not None:
            async with self._fetched.one(tenant):
                fetched = Video(await self._fetch(file.source, "video", tenant), video.num_frames)
                return await self.read_video(fetched, tenant=tenant)
        if not file.data:
            raise BadArgument(
                f"video: give the bytes of the video: this model does not fetch {file.source[:80]!r}",
                param="video",
            )
        medium = ReadMedium("video", len(file.data), num_frames)
        return await self._read((tenant, file.source, num_frames), medium, file.data)

    async def warm_up(self) -> None:
        """Starts a process, so that the first image need not wait for it. Raises like ``read_image``."""
        async with self._turns:
            if self._idle or self._is_closed:
                return
            worker = await self._start()
            self._idle.append(worker)
            if self._is_closed:  # meanwhile
                await self.aclose()

    async def aclose(self) -> None:
        """Ends the processes. Later calls raise ``EngineFailed``."""
        self._is_closed = True
        for workers in (self._idle, self._loading):
            while workers:
                await workers.pop().end()

    async def _read(self, key: _Key, medium: ReadMedium, data: bytes) -> PreparedMedium:
        """Reads a medium unless it is cached. If several calls need the same medium, one of them reads it; if
        that call is cancelled, the next one does."""
        async with self._reading.one(key):
            prepared = self._kept.pop(key, None)
            if prepared is None:
                async with self._turn(key[0], medium):
                    prepared = await self._read_in_process(medium, data, key[0])
                self._kept_bytes += prepared.nbytes
            self._kept[key] = prepared
        while self._kept_bytes > self._limits.cache_bytes:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
        return prepared

    @asynccontextmanager
    async def _turn(self, tenant: str, medium: ReadMedium) -> AsyncIterator[None]:
        """Waits for a process."""
        async with self._turns_of.one(tenant):
            is_slow = medium.kind == "video" or self._slow_until.get(tenant, 0.0) > anyio.current_time()
            async with self._slow_turns if is_slow else contextlib.nullcontext():
                job = await self._wait_for_process()
                try:
                    yield
                finally:
                    self._jobs.remove(job)
                    if job.is_late:
                        self._num_late -= 1
                    else:
                        self._turns.release()

    async def _wait_for_process(self) -> _Job:
        """Waits for a turn among all tenants. If that takes long, late jobs lose their turns."""
        while True:
            with anyio.move_on_after(PATIENCE_S):
                await self._turns.acquire()
                job = _Job(anyio.current_time())
                self._jobs.append(job)
                return job
            before = anyio.current_time() - PATIENCE_S
            late = next((job for job in self._jobs if not job.is_late and job.began <= before), None)
            if late is not None and self._num_late < max(1, self._limits.num_processes - 1):
                late.is_late = True
                self._num_late += 1
                self._turns.release()

    def _note_time(self, tenant: str, seconds: float) -> None:
        """Notes the time that an image of the tenant took."""
        if seconds <= SLOW_S:
            return
        now = anyio.current_time()
        self._slow_until = {one: until for one, until in self._slow_until.items() if until > now}
        self._slow_until[tenant] = now + SLOW_FOR_S

    async def _read_in_process(self, medium: ReadMedium, data: bytes, tenant: str) -> PreparedMedium:
        if self._is_closed:
            raise EngineFailed("the engine has stopped and reads no more images")
        with contextlib.suppress(Killed):  # an idle process may have been killed before
            if self._idle:
                return await self._read_in(self._idle.pop(), medium, data, tenant)
        try:
            return await self._read_in(await self._start(), medium, data, tenant)
        except Killed as killed:
            raise EngineFailed(f"the process that reads images {killed}: try again") from None

    async def _read_in(
        self, worker: MediaWorkerHandle, medium: ReadMedium, data: bytes, tenant: str
    ) -> PreparedMedium:
        began = anyio.current_time()
        cpu_s = self._limits.video_cpu_s if medium.kind == "video" else self._limits.image_cpu_s
        try:
            with anyio.fail_after(cpu_s * self._limits.wall_s):
                return await worker.read(medium, data)
        except TimeoutError:
            raise Overloaded(
                f"{medium.kind}: it could not be read in time, because the processors are busy: try again"
            ) from None
        finally:
            if medium.kind == "image":
                self._note_time(
                    tenant, anyio.current_time() - began if worker.cpu_s is None else worker.cpu_s
                )
            has_room = len(self._idle) < self._limits.num_processes
            if worker.is_usable and has_room and not self._is_closed:
                self._idle.append(worker)
            else:
                await worker.end()

    async def _start(self) -> MediaWorkerHandle:
        """Returns a process that is ready."""
        try:
            worker = (
                self._loading.pop()
                if self._loading
                else MediaWorkerHandle.start(self._settings, self._limits)
            )
        except OSError as error:
            raise EngineFailed(f"the process that reads images cannot be started: {error}") from error
        try:
            with anyio.fail_after(LOAD_S):
                await worker.ready()
        except TimeoutError:
            raise Overloaded(
                "image: the process that reads images did not start in time: try again"
            ) from None
        except anyio.get_cancelled_exc_class():
            if not self._is_closed:
                self._loading.append(worker)  # for the next image: loading takes long
            raise
        finally:
            if not worker.is_usable and worker not in self._loading:
                await worker.end()
        return worker
