"""A server on loopback that answers as the Hugging Face hub does, for the hub's own library.

It has a model's info, its tree, and its files with ranges: small files directly, large ones
(``.safetensors``, ``.gguf``, ``tokenizer.json``) by a redirect to another host, as the hub leads to its
storage. ``faults`` makes it answer wrongly.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".gguf", "tokenizer.json", ".bin")


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@dataclass
class Repository:
    """``files`` by path. ``branches`` and tags with their commits; ``main`` follows the content."""

    files: dict[str, bytes]
    is_gated: bool = False
    token: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + content)
        return digest.hexdigest()

    def knows(self, revision: str) -> bool:
        return revision in ("main", self.commit) or self.tags.get(revision) == self.commit


@dataclass
class Fault:
    """A faulty answer. ``match``: a pattern in ``METHOD /path``. ``times``: how often, then right
    again. ``status`` 0: the right answer, with ``content`` instead of the file's, or closed after
    ``cut_at`` bytes."""

    match: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    cut_at: int | None = None
    times: int = 10**9


@dataclass
class Request:
    line: str
    headers: dict[str, str]


class HubServer(ThreadingHTTPServer):
    """``requests``: the received requests, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.gives_sizes = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: dict[str, bytes]) -> Repository:
        self.repositories[name] = repository = Repository(dict(files))
        return repository

    def downloads(self) -> list[str]:
        """The paths of the files that were fetched, in order."""
        return [
            found[1]
            for request in self.requests
            if (found := re.fullmatch(r"GET /.+/(?:resolve|large)/[^/]+/(.+)", request.line))
        ]


def _hashes(content: bytes) -> tuple[str, str]:
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return git, hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.server.requests.append(Request(line, dict(self.headers.items())))
        self.fault = next(
            (one for one in self.server.faults if one.times > 0 and re.search(one.match, line)), None
        )
        if self.fault is not None:
            self.fault.times -= 1
            if self.fault.status:
                self._answer(self.fault.status, b"", self.fault.headers)
                return
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/(resolve|large)/([^/]+)/(.+)", path):
            self._file(*found.groups())
        else:
            self._answer(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _repository(self, name: str, revision: str) -> Repository | None:
        """None if the request was rejected."""
        repository = self.server.repositories.get(name)
        if repository is None:
            self._answer(401, headers={"X-Error-Code": "RepoNotFound"})
            return None
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            code = "GatedRepo" if repository.is_gated else "RepoNotFound"
            self._answer(401, headers={"X-Error-Code": code})
            return None
        if not repository.knows(revision):
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
            return None
        return repository

    def _info(self, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        siblings = []
        for path, content in repository.files.items():
            git, sha256 = _hashes(content)
            entry: dict[str, object] = {"rfilename": path}
            if self.server.gives_sizes:
                entry |= {"size": len(content), "blobId": git}
                if path.endswith(LARGE):
                    entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
            siblings.append(entry)
        self._json({"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        entries: list[dict[str, object]] = [{"type": "directory", "path": "folder", "oid": "0" * 40}]
        for path, content in repository.files.items():
            git, sha256 = _hashes(content)
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": git}
            if path.endswith(LARGE):
                entry["lfs"] = {"size": len(content), "oid": sha256, "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def _file(self, name: str, kind: str, revision: str, path: str) -> None:
        if kind == "large":  # storage, whose addresses are secret in themselves
            repository = self.server.repositories.get(name)
        else:
            repository = self._repository(name, revision)
            if repository is None:
                return
        if repository is None or path not in repository.files:
            self._answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision})
            return
        content = repository.files[path]
        git, sha256 = _hashes(content)
        headers = {"X-Repo-Commit": repository.commit}
        if path.endswith(LARGE) and kind == "resolve":
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
            headers["Location"] = f"http://localhost:{self.server.server_port}/{name}/large/{revision}/{path}"
            self._answer(302, headers=headers)
            return
        if self.fault is not None and self.fault.content is not None and self.command == "GET":
            content = self.fault.content
        status, start = 200, 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, start = 206, int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._answer(status, content[start:], {**headers, "ETag": f'"{git}"', "Accept-Ranges": "bytes"})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut_at = self.fault.cut_at if self.fault is not None else None
        if cut_at is not None and content:
            content, self.close_connection = content[:cut_at], True
        self.wfile.write(content)


@contextmanager
def hub_on_loopback(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server, which is the hub of this process and of its children. Its cache is in ``home``."""
    from huggingface_hub.utils import close_session

    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        # The library reads its environment when it is imported, which may have happened.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        try:
            yield server
        finally:
            close_session()
            server.shutdown()
            thread.join()
