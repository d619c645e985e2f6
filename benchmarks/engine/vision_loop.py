"""The time for which large and hostile files of images block the server's event loop: the processor time of
the longest section without a switch to other tasks. It is a thread's time, so other load does not change it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from asyncio import events
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio.lowlevel
import httpx2
import numpy as np
from PIL import Image

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.server.app import create_app
from agentflow.server.models.models import one_model
from benchmarks.report import Report

PATH = "/v1/chat/completions"
PIECE_BYTES = 65_536
SIDE = 1_900
"""The side of an image whose uncompressed file almost fills a body."""


class Sections:
    """Measures the callbacks of the event loop of this thread. ``longest_s``: since the last ``reset``."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def reset(self) -> None:
        self.longest_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures within this context."""
        run: Any = events.Handle._run

        def measured(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        events.Handle._run = measured  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            events.Handle._run = run  # type: ignore[method-assign]


def bodies(model: str) -> Iterator[tuple[str, bytes]]:
    """Yields a name and a body for each file."""
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=0)
    large = file.getvalue()
    bomb = io.BytesIO()
    Image.new("L", (7_000, 7_000)).save(bomb, "PNG")
    files = {
        "11 MB": large,
        "11 MB, truncated": large[:-100_000],
        "zeros": large[:8] + bytes(len(large)),
        "polyglot": large[:1_000] + b"<svg>" * (len(large) // 5),
        "49 million pixels": bomb.getvalue(),
    }
    for name, data in files.items():
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which color?"}]
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        yield name, json.dumps(body).encode()
    url = "data:image/png;base64," + "A" * (4 * len(large) // 3) + "!"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    yield "no base64", json.dumps(body).encode()


async def measure_sections(generator: EngineGenerator, report: Report) -> None:
    """Measures ``vision.max_section_ms`` of the worst file; the note has the others."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EngineGenerator]:
        yield generator

    app, sections = create_app(one_model(opened)), Sections()
    found: dict[str, tuple[float, int]] = {}
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")
    async with app.router.lifespan_context(app), client:
        sent = [*bodies(generator.capabilities.model)]
        await _sent(client, sent[-1][1])  # loads the modules for the first request
        for name, body in sent:
            with sections.watching():
                status = await asyncio.create_task(_sent(client, body))  # noqa: TID251 - a separate task
            found[name] = 1e3 * sections.longest_s, status
            sections.reset()
    worst = sorted(found.items(), key=lambda one: -one[1][0])
    note = "; ".join([f"{name}: {ms:.1f} ({status})" for name, (ms, status) in worst])
    report.median(
        "vision.max_section_ms", [worst[0][1][0]], "ms", note=f"processor time; {note}", goal="<= 50"
    )


async def _sent(client: httpx2.AsyncClient, body: bytes) -> int:
    """Sends a body in pieces, as a socket delivers it. Returns the status of the answer."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), PIECE_BYTES):
            await anyio.lowlevel.checkpoint()
            yield body[at : at + PIECE_BYTES]

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return (await client.post(PATH, content=pieces(), headers=headers, timeout=None)).status_code
