"""The results of tools, which may have images or videos.

A result is the text of a variable. One with images is written as a mark and a list of its parts, in which
images have their digests, so that a recording contains it and a replay reads it. The bytes of the images are
uploaded like all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from agentflow.errors import BadArgument, BadRecording
from agentflow.language.expressions import (
    Expression,
    ImageExpression,
    MediumExpression,
    RoleExpression,
    VideoExpression,
    not_appendable,
)
from agentflow.language.markers import MARKERS
from agentflow.language.media import split_result
from agentflow.language.typed.json_form import json_text
from agentflow.language.typed.tools import ToolCall, escape_surrogates
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, Video, medium_kind

logger = logging.getLogger(__name__)

FileOf: TypeAlias = Callable[[str], Image]
"""The file with this source."""
_MARK: Final = "agentflow-parts:"
"""Begins results with images, and results whose text begins so."""


class _Part(msgspec.Struct, omit_defaults=True):
    """One part: a text, an image or a video."""

    text: str | None = None
    image: str | None = None
    video: str | None = None
    num_frames: int | None = None


class ToolContent:
    """The result of a tool. ``parts``: texts, images and videos. Half a surrogate pair in a text, which
    cannot be sent, is escaped."""

    def __init__(self, parts: Sequence[str | MediumExpression]) -> None:
        self.parts = tuple([escape_surrogates(one) if isinstance(one, str) else one for one in parts])

    @property
    def is_text(self) -> bool:
        """Whether it can be passed on as the text of its variable."""
        return all(isinstance(part, str) for part in self.parts) and not self.text.startswith(_MARK)

    @property
    def text(self) -> str:
        """The text, in which images and videos are marks."""
        return "".join(
            [part if isinstance(part, str) else f"[{medium_kind(part.medium)}]" for part in self.parts]
        )

    @property
    def value(self) -> str:
        """The text of its variable."""
        if self.is_text:
            return self.text
        written = [_Part(text=part) if isinstance(part, str) else _written(part) for part in self.parts]
        return _MARK + msgspec.json.encode(written).decode()

    def for_model(self, model: Capabilities) -> ToolContent:
        """The result, in which texts replace the media for a model that accepts no images or videos."""
        parts: list[str | MediumExpression] = []
        for part in self.parts:
            if not isinstance(part, str):
                kind = medium_kind(part.medium)
                if not (model.videos if kind == "video" else model.images):
                    logger.warning("a tool returned one %s, which %s does not accept", kind, model.model)
                    shown = part.file.media_type or kind
                    part = f"[{kind}: {shown}, not shown, because {model.model} accepts no {kind}s]"
            parts.append(part)
        return ToolContent(parts)


def _written(part: MediumExpression) -> _Part:
    medium = part.medium
    if isinstance(medium, Video):
        return _Part(video=medium.file.source, num_frames=medium.num_frames)
    return _Part(image=medium.source)


def tool_result(*parts: Any, call: ToolCall | None = None) -> RoleExpression:
    """A turn with the result of a tool: texts, images and variables, or values, which are written as in
    ``act``: images of Pillow as images, also in lists, and others as JSON. ``call``: the call that it
    answers, whose id some models need.

    >>> s += af.tool_result({"temperature": 12})
    """
    if call is not None and not isinstance(call, ToolCall):
        raise BadArgument(f"tool_result: call must be an af.ToolCall, not {call!r}", param="call")
    written: list[str | Expression] = []
    for part in parts:
        written += [part] if isinstance(part, str | Expression) else _parts_of_value(part)
    return RoleExpression("tool", tuple(written), call)


def _parts_of_value(value: object) -> Sequence[str | MediumExpression]:
    try:
        return content_of_result(value).parts
    except BadArgument:
        raise
    except ValueError:
        raise not_appendable(value) from None


def content_of_result(result: Any) -> ToolContent:
    """The result of a tool. ``ValueError`` if it cannot be written as text."""
    parts = split_result(result, _read_text)
    if parts is None:
        return ToolContent([_read_text(result)])
    MARKERS.reject([part.file.source for part in parts if not isinstance(part, str)], "the URL of an image")
    return ToolContent(parts)


def read_content(value: str, file_of: FileOf) -> ToolContent:
    """The result that has this text of its variable, in a replay. ``BadRecording`` if it is malformed."""
    if not value.startswith(_MARK):
        return ToolContent([value])
    try:
        written = msgspec.json.decode(value.removeprefix(_MARK), type=list[_Part])
    except msgspec.MsgspecError as error:
        raise BadRecording(f"the result of a tool has parts that cannot be read: {error}") from None
    parts: list[str | MediumExpression] = []
    for part in written:
        if part.image is not None:
            parts.append(ImageExpression(file_of(part.image)))
        elif part.video is not None:
            parts.append(VideoExpression(file_of(part.video), part.num_frames))
        else:
            parts.append(part.text or "")
    return ToolContent(parts)


def _read_text(value: Any) -> str:
    """A value as text for the model."""
    text = value if isinstance(value, str) else json_text(value, is_read_back=False)
    MARKERS.reject([text], "the result of a tool")
    return text
