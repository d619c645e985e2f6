"""Programs on a real web server with the engine: clients that vanish, and the text that the engine writes."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import httpx2
import pytest
from support.api_server import ApiServer, api_server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server(constraints=False) as running:
        yield running
        running.wait_until(lambda: len(running.service.programs.store) == 0)
        running.assert_idle()


def num_readers(server: ApiServer) -> int:
    return sum(len(program._readers) for program in server.service.programs.store)


@pytest.mark.parametrize("query", ["", "?stream=true"])
def test_a_reader_that_vanishes_is_forgotten_and_the_program_goes_on(server: ApiServer, query: str) -> None:
    with httpx2.Client(base_url=f"{server.url}/v1") as client:
        path = "/programs/" + client.post("/programs", json={}).json()["id"]
        places = [
            {"name": name, "in_out": in_out, "semantic_var_id": name}
            for name, in_out in (("x", "in"), ("y", "out"))
        ]
        body = {"prompt": "Say {{x}}:{{y}}", "placeholders": places}
        assert client.post(f"{path}/submit", json=body).status_code == 200
        peer = http.client.HTTPConnection(server.url.removeprefix("http://"))
        peer.request("GET", f"/v1{path}/variables/y{query}")
        server.wait_until(lambda: num_readers(server) == 1)
        peer.close()
        server.wait_until(lambda: num_readers(server) == 0)
        client.put(f"{path}/variables/x", json={"value": "hello"})
        value = client.get(f"{path}/variables/y").json()["value"]
        alone = {"prompt": "Say hello:", "max_tokens": 256, "temperature": 0, "model": "fake"}
        assert value == client.post("/completions", json=alone).json()["choices"][0]["text"]
        assert client.delete(path).status_code == 200
