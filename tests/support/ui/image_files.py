"""Images that a test drops on the page, or pastes into it."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image
from support.ui.screen import Screen

_DISPATCH = """([selector, files, kind]) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent(kind, { ...options, clipboardData: data })
    : new DragEvent(kind, { ...options, dataTransfer: data });
  document.querySelector(selector).dispatchEvent(event);
}"""
File = tuple[str, str, bytes]
"""A name, a media type, and the bytes."""


def picture(width: int, height: int, kind: str = "PNG", *, is_noise: bool = False, seed: int = 0) -> bytes:
    """A file. Noise cannot be compressed."""
    if is_noise:
        image = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    else:
        image = Image.new("RGB", (width, height), (40, 120 + seed, 200))
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def drop(screen: Screen, selector: str, *files: File, kind: str = "drop") -> None:
    """Drops the files on an element. ``kind``: of the event, such as ``paste``."""
    encoded = [[name, media_type, base64.b64encode(data).decode()] for name, media_type, data in files]
    screen.page.evaluate(_DISPATCH, [selector, encoded, kind])
