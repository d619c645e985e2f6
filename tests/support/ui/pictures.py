"""Screenshots as small PNG files, for the docs."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

IMAGES = Path(__file__).parents[3] / "docs" / "images"
MAX_BYTES = 200_000


def save_picture(page: Page, name: str) -> None:
    """Writes ``docs/images/NAME.png`` with 256 colours at most."""
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    assert written.tell() < MAX_BYTES, f"{name}: {written.tell()} bytes"
    (IMAGES / f"{name}.png").write_bytes(written.getvalue())
