"""The moving picture of a fork that streams on the page: images/streaming.png, an animated PNG.

    python docs/drawings/streaming.py

It runs the playground's first program on the default model in an installed Chromium, and takes screenshots.
It needs the extra ``ui``.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from benchmarks.browser import open_browser  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "streaming.png"
MAX_BYTES = 2_000_000
WIDTH, HEIGHT = 1080, 720
FRAME_S = 0.25
LAST_S = 3.0  # the end stays this long
# The branches, then what they flow into.
FOLLOW = """() => {
  const branch = document.querySelector('[data-testid="branch-0"]');
  const joined = document.querySelector(".stage > .segment:last-child .call");
  const isOver = joined.dataset.status !== "waiting";
  scrollTo(0, isOver ? document.body.scrollHeight : branch.getBoundingClientRect().top + scrollY - 70);
}"""


def record(url: str) -> list[Image.Image]:
    """Screenshots of a run, one each ``FRAME_S``."""
    frames: list[Image.Image] = []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"{url}/ui/")
        page.locator('[data-status="open"]').wait_for()
        page.get_by_test_id("run").click()
        page.get_by_test_id("branch-0").wait_for()
        ledger = page.get_by_test_id("ledger")
        next_s = time.monotonic()
        while True:
            is_done = ledger.get_attribute("data-status") != "running"
            page.evaluate(FOLLOW)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
            if is_done:
                return frames
            next_s += FRAME_S
            page.wait_for_timeout(max(1, (next_s - time.monotonic()) * 1000))


def write(frames: list[Image.Image]) -> None:
    """Writes the frames with one palette of 64 colours; equal neighbours become one frame."""
    palette = frames[-1].quantize(64, dither=Image.Dither.NONE)
    kept: list[Image.Image] = []
    durations: list[float] = []
    for frame in frames:
        image = frame.quantize(palette=palette, dither=Image.Dither.NONE)
        if kept and image.tobytes() == kept[-1].tobytes():
            durations[-1] += FRAME_S * 1000
        else:
            kept.append(image)
            durations.append(FRAME_S * 1000)
    durations[-1] += LAST_S * 1000
    kept[0].save(PICTURE, save_all=True, append_images=kept[1:], duration=durations, loop=0, optimize=True)
    size = PICTURE.stat().st_size
    print(f"{len(kept)} frames, {size / 1000:.0f} kB")
    assert size < MAX_BYTES


def main() -> None:
    """Starts a server, records and writes."""
    command = [sys.executable, "-m", "agentflow", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if "ws://" in line)
            write(record("http://" + line.partition("ws://")[2].split()[0]))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
