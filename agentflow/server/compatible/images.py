"""Images and videos in the requests of the HTTP APIs. Nothing is decoded and no URL is opened here: models
behind an API get the file or the URL, and the reader of a model of the engine (``engine/media``) decodes and
fetches them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, PlacedImage, Video, check_frames, image_at
from agentflow.server.compatible.field_errors import naming_param
from agentflow.server.errors import unsupported


def image_from_url(url: str, param: str, model: Capabilities) -> Image:
    """The image at a ``data:`` or ``https:`` URL in a request's field ``param``. ``ApiError`` if the model
    accepts no images, or if the URL is invalid."""
    check_images(param, model)
    with naming_param(param):
        return image_at(url)


def check_images(param: str, model: Capabilities) -> None:
    """``ApiError`` for the field ``param`` if the model accepts no images."""
    if not model.images:
        raise unsupported(param, f"{model.model} accepts only text, no images")


def video_from_url(url: str, num_frames: int | None, param: str, model: Capabilities) -> Video:
    """The video at a ``data:`` or ``https:`` URL in a request's field ``param``. ``ApiError`` if the model
    accepts no videos, or if the URL is invalid. ``num_frames``: as in ``Video``, from the same object."""
    check_videos(param, model)
    if num_frames is not None and not model.video_frames:
        raise unsupported(param, f"{model.model} chooses the frames of videos: leave out num_frames")
    with naming_param(param):
        check_frames(num_frames)
        return Video(image_at(url, "video"), num_frames)


def check_videos(param: str, model: Capabilities) -> None:
    """``ApiError`` for the field ``param`` if the model accepts no videos."""
    if not model.videos:
        raise unsupported(param, f"{model.model} accepts no videos")


def check_media(param: str, model: Capabilities, media: Sequence[PlacedImage]) -> None:
    """``ApiError`` for the field ``param`` if the model does not accept the images or videos in it."""
    if any(not placed.video for placed in media):
        check_images(param, model)
    if any(placed.video for placed in media):
        check_videos(param, model)
