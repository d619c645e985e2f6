"""Images in the requests of the HTTP APIs. Nothing is decoded and no URL is opened here: models behind an API
get the file or the URL, and the reader of a model of the engine (``engine/media``) decodes and fetches them.
"""

from __future__ import annotations

from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, image_at
from agentflow.server.compatible.field_errors import naming_param
from agentflow.server.errors import unsupported


def image_of(url: str, place: str, model: Capabilities) -> Image:
    """The image at a ``data:`` or ``https:`` URL in a request's field ``place``. ``ApiError`` if the model
    accepts none, or if there is no image."""
    check_images(place, model)
    with naming_param(place):
        return image_at(url)


def check_images(place: str, model: Capabilities) -> None:
    """``ApiError`` for the field ``place`` if the model accepts no images."""
    if not model.images:
        raise unsupported(place, f"{model.model} takes only text, no images")
