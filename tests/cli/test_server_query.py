"""The requests of commands to a running server: answers, and errors in one line."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from support.commands import call_cli
from support.wire_server import thread_server

from agentflow.cli.models import LOCAL_COLUMNS, _Room, describe_model, names_tools, print_table, server_models
from agentflow.cli.server_query import http_url, query_server
from agentflow.errors import BadArgument, NotAuthorized, ProtocolError, ServerError, ServerUnreachable

KEY = "af-right"
MODELS = {
    "object": "list",
    "data": [
        {
            "id": "a",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "agentflow",
            "context_length": 8192,
        },
        {"id": "b\x1b", "object": "model"},
    ],
}


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path, self.headers.get("Authorization"):
            case "/open", _:
                self._answer(200, b"hello")
            case ("/v1/models", key) if key == f"Bearer {KEY}":
                self._answer(200, json.dumps(MODELS).encode())
            case "/v1/models", _:
                self._answer(401)
            case "/metrics", _:
                self._answer(403)
            case "/broken", _:
                self._answer(500)
            case _:
                self._answer(404)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with _answering() as found:
        yield found


@contextmanager
def _answering() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://a:1", "http://a:1"),
        ("ws://a:1/v1/session", "http://a:1"),
        ("wss://a", "https://a"),
        ("https://[::1]:9/x?y#z", "https://[::1]:9"),
        (None, "http://127.0.0.1:8410"),
    ],
)
def test_a_server_is_named_by_any_of_its_urls(given, found, monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    assert http_url(given) == found
    monkeypatch.setenv("AGENTFLOW_URL", "ws://b:2")
    assert http_url(given) == (found if given else "http://b:2")


@pytest.mark.parametrize("given", ["foo", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://[a"])
def test_a_url_without_a_server_is_an_error(given):
    with pytest.raises(BadArgument):
        http_url(given)


def test_an_answer(url):
    assert query_server(url, "/open", None) == b"hello"
    assert json.loads(query_server(url, "/v1/models", KEY)) == MODELS


def test_the_key_may_stand_in_the_environment(url, monkeypatch):
    monkeypatch.setenv("AGENTFLOW_API_KEY", KEY)
    assert json.loads(query_server(url, "/v1/models", None)) == MODELS


@pytest.mark.parametrize(
    ("path", "key", "kind", "named"),
    [
        ("/v1/models", None, NotAuthorized, "--api-key"),
        ("/v1/models", "wrong", NotAuthorized, "API key"),
        ("/metrics", KEY, NotAuthorized, "/metrics"),
        ("/nothing", None, ProtocolError, "/nothing"),
        ("/broken", None, ServerError, "500"),
    ],
)
def test_an_error_is_one_line_without_the_key(url, path, key, kind, named, monkeypatch):
    monkeypatch.delenv("AGENTFLOW_API_KEY", raising=False)
    with pytest.raises(kind) as caught:
        query_server(url, path, key)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert key is None or key not in str(caught.value)


def test_an_unreachable_server_is_named():
    with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:9 "):
        query_server("http://127.0.0.1:9", "/metrics", None)


def test_the_models_of_a_server(url):
    assert server_models(query_server(url, "/v1/models", KEY), url) == [
        ("a", "agentflow", "8,192", "2023-11-14 22:13 UTC"),
        ("b\x1b", "-", "-", "-"),
    ]
    shown = call_cli("models", "--url", url, "--api-key", KEY).stdout.splitlines()
    assert [line.split("\t")[0] for line in shown] == ["model", "a", "b·"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data": 3}',
        b'{"data": [3]}',
        b'{"data": [{}]}',
        b"[" * 100_000,
        b'{"data": [{"id": "a", "created": 1e24}]}',
        b'{"data": [{"id": "a", "created": -1e18}]}',
    ],
    ids=lambda content: content[:60].decode(),
)
def test_f37_an_answer_that_is_no_list_of_models_is_told(content):
    with pytest.raises(ProtocolError):
        server_models(content, "http://a")


def test_the_models_here(model_folder):
    result = call_cli("models")
    header, *rows = (line.split("\t") for line in result.stdout.splitlines())
    row = dict(zip(header, rows[0], strict=True))
    assert row["model"] == "smollm2-135m"
    assert (row["here"], row["memory"], row["context"]) == ("yes", "785 MB", "8,192")
    assert (row["chat"], row["tools"]) == ("yes", "no")


def test_a_model_that_is_not_here_can_be_pulled(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    result = call_cli("models")
    assert result.stdout.splitlines()[1].split("\t")[:3] == ["smollm2-135m", "no", "90 MB"]


@pytest.mark.parametrize(
    "weights",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n",
        b"\xff" * 16,
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
    ids=["git-lfs", "ff", "deep"],
)
def test_f37_a_folder_without_its_weights_is_damaged(weights: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert describe_model(tmp_path, _Room())[1] == "damaged"


def test_a_damaged_folder_is_said_to_be_one(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert describe_model(tmp_path, _Room())[1] == "damaged"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}x{% endif %}", True),
        ("{%- for tool in tools -%}", True),
        ("{{ tools | tojson }}", True),
        ("{# no tools here #}{{ messages }}", False),
        ("You have no tools. {{ messages }}", False),
        ("{{ toolset }}", False),
    ],
)
def test_a_template_that_knows_of_tools(template, expected):
    assert names_tools(template) is expected


def test_top_shows_a_server_once():
    with thread_server() as server:
        result = call_cli("top", "--url", server.url, "--once", "--interval", "0.1")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"agentflow http{server.url.removeprefix('ws')}   0 sessions")
    assert any(line.split()[1:5] == ["0", "0", "0", "0"] for line in lines)  # a model that does nothing


def test_top_tells_what_is_wrong_in_one_line(url):
    for address, told in ((url, "/metrics"), ("http://127.0.0.1:9", "http://127.0.0.1:9")):
        result = call_cli("top", "--url", address, "--api-key", KEY)
        assert result.returncode == 1
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "1e9"])
def test_an_interval_is_a_number_of_seconds(interval):
    result = call_cli("top", f"--interval={interval}")
    assert result.returncode == 2
    assert "from 0.1 to 3600" in result.stderr


@pytest.mark.parametrize("width", [80, 40])
def test_f37_names_of_models_are_whole_on_narrow_terminals(width: int) -> None:
    row = (
        "smollm2-135m",
        "yes",
        "98 MB",
        "785 MB",
        "36,066 tokens",
        "131,072",
        "yes",
        "no",
        "no",
        "apache-2.0",
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_table(LOCAL_COLUMNS, [row], console)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "smollm2-135m" in lines[1]
    assert "36,066 tokens" in lines[1]
