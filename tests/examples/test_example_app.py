"""examples/app: its page, the stream of a program with branches, and disconnects."""

from __future__ import annotations

from pathlib import Path

import pytest
from app.service import VIEWS, create_app
from fastapi import FastAPI
from scripted_example import client_of, events, idle
from support.server.http_clients import only_asyncio

import agentflow as af

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).parents[2] / "examples" / "app" / "static"
TEXTS = {"view": "It is <b>good</b>.\nOr not.", "summary": "It depends."}
ASKED = {"question": "Why?"}


anyio_backend = pytest.fixture(only_asyncio)


def on(backend: af.Scripted) -> FastAPI:
    return create_app(lambda: af.open_session(backend=backend))


async def test_branches_and_their_summary_stream_by_path() -> None:
    async with client_of(on(af.Scripted(TEXTS))) as client:
        answer = await client.get("/discuss", params=ASKED)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(answer.text)
    texts: dict[tuple[tuple[int, ...], str], str] = {}
    for kind, piece in pieces:
        assert kind == "message"
        key = (tuple(piece["path"]), piece["name"])
        texts[key] = texts.get(key, "") + piece["text"]
    assert texts == {((), "summary"): TEXTS["summary"]} | {
        ((number,), "view"): TEXTS["view"] for number in range(len(VIEWS))
    }
    assert last == ("done", TEXTS["summary"])


async def test_the_page_and_its_files_have_a_strict_policy() -> None:
    async with client_of(on(af.Scripted(TEXTS))) as client:
        for path in ("/", *(f"/{file.name}" for file in PAGE.iterdir()), "/views", "/health", "/none"):
            answer = await client.get(path)
            assert answer.status_code == (404 if path == "/none" else 200)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/views")).json() == list(VIEWS)


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    script = (PAGE / "page.js").read_text(encoding="utf-8")
    assert not any(found in page for found in ("<style", "style=", "onclick", "//"))
    assert page.count("<script") == page.count('<script type="module" src=') == 1
    assert not any(
        found in script for found in ("innerHTML", "insertAdjacentHTML", "eval(", "http:", "https:")
    )


async def test_a_client_that_disconnects_cancels_all_branches() -> None:
    backend = af.Scripted({"view": "word " * 70, "summary": "short"})
    async with client_of(on(backend)) as client:
        for num_lines in (0, 1, 7):
            async with client.stream("GET", "/discuss", params=ASKED) as response:
                lines = response.aiter_lines()
                for _ in range(num_lines):
                    await anext(lines)
            await idle(backend)


async def test_a_failure_is_the_last_event() -> None:
    async with client_of(on(af.Scripted([af.errors.EngineFailed("broken")] * 4))) as client:
        kind, message = events((await client.get("/discuss", params=ASKED)).text)[-1]
    assert kind == "error"
    assert "broken" in message


@pytest.mark.parametrize("question", ["", "?" * 2001])
async def test_questions_are_limited(question: str) -> None:
    async with client_of(on(af.Scripted(TEXTS))) as client:
        assert (await client.get("/discuss", params={"question": question})).status_code == 422


async def test_the_session_is_shared() -> None:
    opened: list[af.OpenSession] = []

    async def open_one() -> af.OpenSession:
        opened.append(await af.open_session(backend=af.Scripted(TEXTS)))
        return opened[-1]

    async with client_of(create_app(open_one)) as client:
        for _ in range(2):
            answer = await client.get("/discuss", params=ASKED)
            assert events(answer.text)[-1][0] == "done"
            assert len(opened) == 1
    assert not any(flow.is_alive for flow in opened)


async def test_without_a_server_it_says_so_and_works_once_there_is_one() -> None:
    is_up = False

    async def open_one() -> af.OpenSession:
        if not is_up:
            raise af.errors.ServerUnreachable("nothing listens there")
        return await af.open_session(backend=af.Scripted(TEXTS))

    async with client_of(create_app(open_one)) as client:
        answer = await client.get("/discuss", params=ASKED)
        assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
        is_up = True
        assert (await client.get("/discuss", params=ASKED)).status_code == 200
