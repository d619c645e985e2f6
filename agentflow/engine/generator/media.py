"""Reads the images of a state before its text is encoded."""

from __future__ import annotations

from typing import Protocol

import anyio

from agentflow.engine.client import EngineClient
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.text.token_state import TokenState
from agentflow.protocol.images import Image
from agentflow.runtime.task_group import first_of, open_task_group

MOST_AT_ONCE = 4
"""The images of one state that are read at the same time."""


class ImageReader(Protocol):
    """Prepares images for a model (``media.reader``). ``image_token``: the text that a chat template writes
    for an image, and that the image's pieces replace."""

    image_token: str

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        """Returns the image as the model reads it. ``BadArgument`` with the ``param`` ``image``."""
        ...


async def read_images(
    tokens: TokenState, reader: ImageReader, client: EngineClient, tenant: str, images: list[Image]
) -> None:
    """Prepares images of a state, and gives them to the engine. Cancelling it cancels the reading.

    Args:
        tokens: the state.
        reader: prepares images.
        client: the engine.
        tenant: to which their pixels are charged.
        images: the images.

    Raises:
        BadArgument: an image cannot be read.
        Overloaded: the images of the tenant, or of all, take too much memory.
    """
    turns = anyio.CapacityLimiter(MOST_AT_ONCE)

    async def read(image: Image) -> None:
        async with turns:
            tokens.prepared(image, client.add_medium(await reader.read_image(image, tenant=tenant), tenant))

    if len(images) == 1:
        await read(images[0])
        return
    try:
        async with open_task_group() as group:
            for image in images:
                group.start_soon(read, image)
    except ExceptionGroup as failed:  # several, perhaps for the same reason
        raise first_of(failed) from failed
