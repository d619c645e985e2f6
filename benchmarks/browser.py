"""Drives an installed Chromium with Playwright, for the page's benchmark, its tests, and the docs' pictures.

The browser is the first of ``NAMES`` on the PATH, such as Debian's; Playwright does not download one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No sandbox: containers and CI run as root. The rest keeps the browser from using a GPU or the network.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--font-render-hinting=none")


class NoBrowser(Exception):
    """No Chromium is installed."""


def chromium() -> str:
    """Returns the path of the browser's executable. Raises ``NoBrowser`` if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowser(
            f"no Chromium on the PATH (looked for {', '.join(NAMES)}): install one, such as Debian's package "
            "chromium"
        )
    return found


@contextmanager
def open_browser(*flags: str) -> Iterator[Browser]:
    """Opens a headless browser. ``flags``: further flags of its command."""
    executable = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()
