"""Pages in a browser that are checked while a test uses them: errors, foreign requests, leaked keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    WebSocket,
    expect,
)

TIMEOUT_MS = 15_000
expect.set_options(timeout=TIMEOUT_MS)  # its own is 5 s, and the CI runs other checks next to these tests
_STORED = """() => JSON.stringify([
  {...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state, window.name
])"""


@dataclass
class Screen:
    """A page with a separate browser context. ``problems``: the browser's complaints, and requests
    to other hosts. ``secrets``: texts that may stand in no address and no storage."""

    page: Page
    url: str
    secrets: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    _expected: list[str] = field(default_factory=list)

    def expect_problem(self, pattern: str) -> None:
        """Problems in which this regular expression is found are part of the test."""
        self._expected.append(pattern)

    def open(self, view: str) -> Locator:
        """Goes to a view, such as ``playground``, and waits until it stands."""
        self.page.goto(f"{self.url}/ui/#/{view}")
        return self.view(view)

    def view(self, name: str) -> Locator:
        """A view's element, when it is visible."""
        found = self.at(f"view-{name}")
        found.wait_for()
        return found

    def at(self, test_id: str) -> Locator:
        """The elements with this test id."""
        return self.page.get_by_test_id(test_id)

    def wait_status(self, kind: str) -> None:
        """Waits until the header shows this state of the connection, such as ``open``."""
        self.page.locator(f'[data-testid=status][data-status="{kind}"]').wait_for()

    def give_key(self, key: str) -> None:
        """Types a key into the prompt, which the page must have opened."""
        self.secrets.append(key)
        self.at("key-input").fill(key)
        self.page.keyboard.press("Enter")

    def wait(self, condition: str, argument: Any = None) -> None:
        """Waits until a function of the page's returns something true. (Playwright's own way to wait for one
        needs eval, which the page does not allow.)"""
        polled = f"""async (argument) => {{
          const end = performance.now() + {TIMEOUT_MS};
          while (!({condition})(argument)) {{
            if (performance.now() > end) throw new Error("timed out");
            await new Promise((resolve) => requestAnimationFrame(resolve));
          }}
        }}"""
        self.page.evaluate(polled, argument)

    def check(self) -> None:
        """At the end of a test: nothing unexpected happened, and nothing secret is kept or was sent in an
        address."""
        left = [p for p in self.problems if not any(re.search(e, p) for e in self._expected)]
        assert not left, "\n".join(left)
        if self.secrets and not self.page.is_closed():
            kept = self.page.evaluate(_STORED)
            for secret in self.secrets:
                assert secret not in kept
        for secret in self.secrets:
            assert [address for address in self.addresses if secret in address] == []

    def _watch(self, context: BrowserContext) -> None:
        own = urlsplit(self.url).netloc

        def console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.problems.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

        def sent(address: str) -> None:
            self.addresses.append(address)
            split = urlsplit(address)
            if split.scheme not in ("data", "blob") and split.netloc != own:
                self.problems.append(f"a request to another host: {address}")

        def requested(request: Request) -> None:
            sent(request.url)

        def connected(socket: WebSocket) -> None:
            sent(socket.url)

        context.on("request", requested)
        self.page.on("console", console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.on("websocket", connected)


def new_screen(browser: Browser, url: str, **options: Any) -> Screen:
    """An empty page for the server at ``url``. ``options``: of the browser's context."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(TIMEOUT_MS)
    screen = Screen(context.new_page(), url)
    screen._watch(context)
    return screen
