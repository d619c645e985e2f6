"""Reads the images and videos of a state before its text is encoded."""

from __future__ import annotations

from typing import Protocol

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import PromptLimits
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.text.state.token_state import TokenState
from agentflow.protocol.images import Image, Medium, MediumKind, Video
from agentflow.runtime.task_group import first_of, open_task_group

MOST_AT_ONCE = 4
"""The images and videos of one state that are read at the same time."""


class Reader(Protocol):
    """Prepares images and videos for a model (``media.reader``). ``image_token``, ``video_token``: the text
    that a chat template writes for a medium, and that the medium's pieces replace. Without a ``video_token``,
    the model reads no videos."""

    image_token: str
    video_token: str

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        """Returns the image as the model reads it. ``BadArgument`` with the ``param`` ``image``."""
        ...

    async def read_video(self, video: Video, *, tenant: str = "") -> PreparedMedium:
        """Returns the frames of a video as the model reads them. ``BadArgument`` with the ``param`` ``video``
        or ``num_frames``."""
        ...


def placeholder_tokens(reader: Reader) -> dict[MediumKind, str]:
    """Returns the texts that stand for an image and for a video."""
    return {"image": reader.image_token, "video": reader.video_token}


async def read_media(
    tokens: TokenState,
    reader: Reader,
    client: EngineClient,
    tenant: str,
    media: list[Medium],
    limits: PromptLimits,
) -> None:
    """Prepares images and videos of a state, and gives them to the engine. Cancelling it cancels the reading.

    Args:
        tokens: the state.
        reader: prepares them.
        client: the engine.
        tenant: to which their pixels are charged.
        media: the images and videos.
        limits: the longest prompt. As soon as the media exceed it, no more are read.

    Raises:
        BadArgument: one of them cannot be read.
        Overloaded: the media of the tenant, or of all, take too much memory.
        PromptTooLong: the media have too many tokens.
    """
    left = iter(media)
    num_tokens = 0

    async def read() -> None:
        nonlocal num_tokens
        for medium in left:
            if isinstance(medium, Video):
                prepared = await reader.read_video(medium, tenant=tenant)
            else:
                prepared = await reader.read_image(medium, tenant=tenant)
            num_tokens += tokens.prepared(medium, client.add_medium(prepared, tenant))
            limits.check_num_tokens(num_tokens)

    if len(media) == 1:
        await read()
        return
    try:
        async with open_task_group() as group:
            for _ in range(min(MOST_AT_ONCE, len(media))):
                group.start_soon(read)
    except ExceptionGroup as failed:  # several, perhaps for the same reason
        raise first_of(failed) from failed
