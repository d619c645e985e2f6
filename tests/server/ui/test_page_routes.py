"""The page's files over HTTP: headers that confine them, caching, and files that are not served."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import httpx2
import pytest
from support.api_server import ApiServer, api_server
from support.faulty_servers import tenants
from support.server.module_servers import module_server

from agentflow.server.ui.pages import STATIC, policy

PAGE = Path(__file__).parents[3] / "ui"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


server = module_server(tenants=tenants(), constraints=False)


def get(server: ApiServer, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(server.url + path, headers=headers, follow_redirects=False)


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/index.html"])
def test_the_page_needs_no_key_and_is_confined(server: ApiServer, path: str) -> None:
    answer = get(server, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == (STATIC / "index.html").read_bytes()
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'self'"
    host = server.url.removeprefix("http://")
    assert rules["connect-src"] == f"'self' ws://{host} wss://{host}"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


def test_all_built_files_are_served_with_their_types(server: ApiServer) -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    types[".txt"] = "text/plain"
    for file in STATIC.rglob("*"):
        if file.is_file():
            answer = get(server, f"/ui/{file.relative_to(STATIC).as_posix()}")
            assert answer.status_code == 200
            assert answer.content == file.read_bytes()
            assert answer.headers["content-type"].partition(";")[0] == types[file.suffix]
            assert "content-security-policy" in answer.headers


def test_f37_the_licenses_of_all_libraries_in_the_page_are_served(server: ApiServer) -> None:
    package = json.loads((PAGE / "package.json").read_text())
    text = get(server, "/ui/licenses.txt").text
    for name, version in package["dependencies"].items():
        assert f"## {name} - {version} (" in text


def test_a_browser_keeps_files_until_they_change(server: ApiServer) -> None:
    etag = get(server, "/ui/").headers["etag"]
    again = get(server, "/ui/", **{"if-none-match": f'"other", {etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert get(server, "/ui/", **{"if-none-match": '"other"'}).status_code == 200


def test_files_are_compressed_where_the_browser_reads_it(server: ApiServer) -> None:
    with httpx2.stream("GET", server.url + "/ui/", headers={"accept-encoding": "br, gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(answer.iter_raw())) == (STATIC / "index.html").read_bytes()
    for accepted in ("identity", "br", "gzip;q=0"):
        assert "content-encoding" not in get(server, "/ui/", **{"accept-encoding": accepted}).headers


def test_browsers_are_led_to_the_page_and_programs_are_not(server: ApiServer) -> None:
    answer = get(server, "/", **HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")
    answer = get(server, "/", accept="application/json")
    assert answer.status_code == 200
    assert {"POST /v1/chat/completions", "WebSocket /v1/session"} < set(answer.json()["endpoints"])
    answer = get(server, "/v1/chat")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/ui/missing.js", "/ui/../pages.py", "/ui/%2e%2e/pages.py", "/ui//etc/passwd", "/ui/assets/"]
)
def test_nothing_else_is_served(server: ApiServer, path: str) -> None:
    assert get(server, path).status_code == 404


def test_a_host_name_cannot_add_rules() -> None:
    assert "evil" not in policy("a.example; script-src evil")
    assert "ws://[::1]:8410" in policy("[::1]:8410")


def test_a_server_may_have_no_page() -> None:
    with api_server(constraints=False, has_page=False) as server:
        assert get(server, "/ui/").status_code == 404
        assert get(server, "/", **HTML).status_code == 200
