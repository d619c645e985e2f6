"""A FastAPI service: whole answers, streams, errors, and disconnects, with a real server and client."""

import pytest
from fastapi import FastAPI
from fastapi_stream import create_app, main
from scripted_example import client_of, events, idle, shown
from support.server.http_clients import only_asyncio

import agentflow as af

pytestmark = pytest.mark.anyio


anyio_backend = pytest.fixture(only_asyncio)


def on(backend: af.Scripted) -> FastAPI:
    return create_app(lambda: af.session(backend=backend))


async def test_an_answer_comes_whole_or_in_pieces():
    backend = af.Scripted({"answer": "Light,\nwater and\n\nair."})
    async with client_of(on(backend)) as client:
        whole = await client.get("/explain", params={"question": "What?"})
        assert whole.json() == {"answer": "Light,\nwater and\n\nair."}
        streamed = await client.get("/explain/stream", params={"question": "What?"})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *pieces, last = events(streamed.text)
        assert "".join(piece["text"] for _, piece in pieces) == "Light,\nwater and\n\nair."
        assert last == ("done", "Light,\nwater and\n\nair.")
    assert [call.messages[0]["content"] for call in backend.calls] == ["What?", "What?"]


async def test_a_client_that_disconnects_cancels_its_program():
    backend = af.Scripted({"answer": "word " * 150})
    async with client_of(on(backend)) as client:
        for num_lines in (0, 1, 7):
            for _ in range(5):
                async with client.stream("GET", "/explain/stream", params={"question": "?"}) as response:
                    lines = response.aiter_lines()
                    for _ in range(num_lines):
                        await anext(lines)
                await idle(backend)
        assert (await client.get("/explain", params={"question": "?"})).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"), [(af.Overloaded("full"), 503), (af.PromptTooLong("too long"), 400)]
)
async def test_errors_are_statuses_of_http(error, status):
    async with client_of(on(af.Scripted([error]))) as client:
        answer = await client.get("/explain", params={"question": "?"})
        assert (answer.status_code, "Retry-After" in answer.headers) == (status, status == 503)
        assert (await client.get("/explain")).status_code == 422


async def test_an_error_in_a_stream_is_its_last_event():
    async with client_of(on(af.Scripted([af.errors.EngineFailed("broken")]))) as client:
        answer = await client.get("/explain/stream", params={"question": "?"})
        [(kind, message)] = events(answer.text)
        assert kind == "error"
        assert "broken" in message


async def test_errors_are_shown():
    page = await shown(main, af.Scripted([af.errors.EngineFailed("[/] broken")] * 2))
    assert page.count("[/] broken") == 2


async def test_two_answers_are_shown():
    page = await shown(main, af.Scripted({"answer": " ".join(f"w{i}" for i in range(150))}))
    assert "w149" in page
    assert "w5 … (disconnected)" not in page
    assert "w11 … (disconnected)" in page
