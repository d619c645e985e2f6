"""Images: from a URL, a file or its bytes to what goes over the wire."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from agentflow.errors import BadArgument
from agentflow.language.expressions import ImageExpression

_IMAGE_STARTS = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}


def image(source: str | bytes | os.PathLike[str]) -> ImageExpression:
    """An image: a URL (``https:`` or ``data:``), the bytes of a file, or a file's path.

    Refused where the backend's model has no vision.

    >>> s += af.user(af.image("chart.png"), "What does the chart show?")
    """
    if isinstance(source, str) and source.startswith(("https:", "data:image/")):
        return ImageExpression(source)
    if isinstance(source, str) and source.startswith(("http:", "data:")):
        raise BadArgument(f"image: a URL must begin with https: or data:image/, not as {source[:40]!r} does")
    if isinstance(source, bytes):
        return ImageExpression(_data_url(source))
    if not isinstance(source, str | os.PathLike):
        raise BadArgument(f"image: give a URL, a file's path or its bytes, not {source!r:.80}")
    try:
        data = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadArgument(f"image: {os.fspath(source)!r:.200} cannot be read: {why}") from None
    return ImageExpression(_data_url(data))


def _data_url(data: bytes) -> str:
    for kind, start in _IMAGE_STARTS.items():
        if data.startswith(start) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    raise BadArgument(f"image: {data[:12]!r}… is the start of no image: PNG, JPEG, GIF and WebP are known")
