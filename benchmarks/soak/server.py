"""The server of a soak run: ``agentflow serve`` as a separate process, which is observed from outside and
whose engine can be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import IO
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.raw_http import BadAnswer, Request, exchange
from benchmarks.soak.samples import Sample

MODEL = "smollm2-135m"
KV_TOKENS = 8_000
RESUME_GRACE_S = 5.0
END_S = 60.0
SCRAPE_S = 8.0
STEP_TIMEOUT_S = 15.0

# The log lines that killed engines and invalid requests may cause. All others are unexpected. Lines of level
# INFO are routine, except an answer with status 500.
_EXPECTED = (
    r"agentflow serves .* at ws://",
    r"OpenAI's API is at http://",
    r"^\S+ \S+ INFO (?!(GET|POST) /\S* 500 )",
    r"replica \d+ hung: it was silent for \S+ s with unfinished requests with \d+ unfinished requests",
    r"(the engine|replica \d+) was killed by SIGKILL with \d+ unfinished requests; restarting it",
    r"Invalid HTTP request received\.",
    r"Unsupported upgrade request\.",
    r"No supported WebSocket library detected",
    r"^\s*$",
)


class SoakServer:
    """One running server."""

    def __init__(self, process: psutil.Process, url: str, log: Path) -> None:
        self.url = url
        self.port = urlsplit(url).port or 0
        self._process = process
        self._log = log
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the server was ready."""
        return time.monotonic() - self._began_s

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return bool(self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE)

    def kill_engine(self, random: Random) -> bool:
        """Kills an engine with SIGKILL. Returns False if there is no engine process at the time."""
        return self._signal(random, signal.SIGKILL)

    def stop_engine(self, random: Random) -> bool:
        """Stops an engine, which then hangs. Returns False if there is no engine process at the time."""
        return self._signal(random, signal.SIGSTOP)

    def _signal(self, random: Random, number: signal.Signals) -> bool:
        engines = self._children("agentflow.engine.process.worker")
        if not engines:
            return False
        random.choice(engines).send_signal(number)
        return True

    async def sample(self) -> Sample:
        """Takes a sample."""
        engines = self._children("agentflow.engine.process.worker")
        compilers = self._children("agentflow.engine.grammar.compiler.worker")
        gauges = await self._gauges()
        return Sample(
            at_s=self.now_s,
            server_mb=_resident_mb(self._process),
            engine_mb=sum(map(_resident_mb, engines)),
            compiler_mb=sum(map(_resident_mb, compilers)),
            fds=self._process.num_fds(),
            threads=self._process.num_threads(),
            tasks=gauges.get("agentflow_tasks"),
            sessions=gauges.get("agentflow_sessions"),
            running=gauges.get("agentflow_running_requests"),
            waiting=gauges.get("agentflow_waiting_requests"),
            in_use=gauges.get("agentflow_kv_tokens in_use"),
        )

    def unexpected_lines(self) -> list[str]:
        """Returns the lines of its log that no client may cause, such as lines of a traceback."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if not any(re.search(pattern, line) for pattern in _EXPECTED)]

    async def _gauges(self) -> dict[str, float]:
        try:
            answer = await exchange(self.port, Request("GET", "/metrics"), timeout_s=SCRAPE_S)
        except (OSError, BadAnswer, TimeoutError):
            return {}
        return {
            " ".join((sample.name, *filter(None, [sample.labels.get("state")]))): sample.value
            for family in text_string_to_metric_families(answer.body.decode())
            if family.type == "gauge"
            for sample in family.samples
        }

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in self._process.children():
            try:
                if module in child.cmdline():
                    found.append(child)
            except psutil.Error:
                continue
        return found


@contextmanager
def soak_server(log: Path, replicas: int = 1) -> Iterator[SoakServer]:
    """Runs a server with a cache that is always full, on a free port. Its output goes to ``log``."""
    options = ["--model", MODEL, "--port", "0", "--kv-tokens", f"{KV_TOKENS}", "--max-running", "16"]
    options += ["--dtype", "bfloat16"]
    options += ["--resume-grace", f"{RESUME_GRACE_S}"]
    if replicas > 1:  # a stopped one is found soon
        options += ["--replicas", f"{replicas}", "--step-timeout", f"{STEP_TIMEOUT_S}"]
    command = [sys.executable, "-m", "agentflow", "serve", *options]
    with (
        log.open("w", encoding="utf-8") as output,
        server_process(command, output, {"PYTHONUNBUFFERED": "1"}) as process,
    ):
        url = _url_when_ready(process, log)
        yield SoakServer(psutil.Process(process.pid), url, log)


@contextmanager
def server_process(
    command: list[str], output: IO[str], settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server, which has ``END_S`` to end when the scope does. ``settings``: more environment
    variables."""
    environment = {**os.environ, **settings}
    with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _url_when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        found = re.search(r"at (ws://\S+)", log.read_text(encoding="utf-8"))
        if found:
            return found[1]
        time.sleep(0.1)  # noqa: TID251  another program's output: nothing to wait for
    raise SystemExit(f"the server ended before it was ready:\n{log.read_text(encoding='utf-8')}")


def _resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 1e6
    except psutil.Error:
        return 0.0
