"""The peer: the benchmarks of llama.cpp on a GGUF file, each in a separate process.

``LLAMA_CPP`` is the folder of ``llama-bench`` and ``llama-batched-bench``; without it, they are looked up on
``PATH``. Build them with ``-DGGML_NATIVE=ON``, for the instructions of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

VARIABLE = "LLAMA_CPP"
TIMEOUT_S = 600.0


class LlamaCpp:
    """Measures tokens per second. ``threads``: CPU threads."""

    def __init__(self, file: Path, threads: int) -> None:
        self._file = file
        self._threads = threads

    @staticmethod
    def is_there() -> bool:
        """Whether both programs were found."""
        return all(_found(name) for name in ("llama-bench", "llama-batched-bench"))

    def decode_tokens_s(self, context: int, num_tokens: int) -> float:
        """Returns the tokens per second of one stream after ``context`` tokens."""
        return self._bench("-p", "0", "-n", str(num_tokens), "-d", str(context))

    def prefill_tokens_s(self, num_tokens: int) -> float:
        """Returns the tokens per second of one prompt."""
        return self._bench("-p", str(num_tokens), "-n", "0")

    def batched_tokens_s(self, num_streams: int, context: int, num_tokens: int) -> float:
        """Returns the tokens per second of all streams together, each after an unshared prompt of ``context``
        tokens."""
        slots = num_streams * (context + num_tokens)
        sizes = ["-c", str(slots), "-npp", str(context), "-ntg", str(num_tokens), "-npl", str(num_streams)]
        lines = self._run("llama-batched-bench", *sizes, "--output-format", "jsonl").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        speed: float = found[-1]["speed_tg"]
        return speed

    def _bench(self, *options: str) -> float:
        made: list[dict[str, Any]] = json.loads(self._run("llama-bench", *options, "-r", "1", "-o", "json"))
        speed: float = made[0]["avg_ts"]
        return speed

    def _run(self, name: str, *options: str) -> str:
        program = _found(name)
        assert program is not None
        command = [program, "-m", str(self._file), "-t", str(self._threads), *options]
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        ).stdout


def _found(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get(VARIABLE) or None)
