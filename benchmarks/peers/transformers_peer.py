"""The peer: ``generate`` of transformers in bfloat16 with eager attention, in a separate process, so that the
engine's settings (threads, their waiting policy) do not affect it. Also its client.

Run as a module, it reads requests as JSON, one per line: ``{"prompt": [ids], "num_tokens": n}``; 0 tokens
request a bare forward pass. It answers with the seconds of the request.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from agentflow.engine.store.gguf.file import find_gguf


class Transformers:
    """Starts the peer's process and sends it requests."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peers.transformers_peer", str(folder), str(num_threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it is ready

    def generate_s(self, prompt: list[int], num_tokens: int) -> float:
        """Returns the seconds for one greedy generation of exactly this many tokens."""
        return self._ask(prompt, num_tokens)

    def prefill_s(self, prompt: list[int]) -> float:
        """Returns the seconds for one forward pass over the prompt, with logits of the last token only."""
        return self._ask(prompt, 0)

    def __enter__(self) -> Transformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _ask(self, prompt: list[int], num_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; its error is above")
        return float(line)


def answer(folder: str, num_threads: int) -> None:
    """The peer's process: loads the model and answers until its input ends."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(num_threads)
    gguf = find_gguf(Path(folder))
    options: dict[str, Any] = {}
    if gguf is not None:
        options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        **options,
    )
    model.train(False)
    print(0.0, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["prompt"]])
        num_tokens = request["num_tokens"]
        start = time.perf_counter()
        with torch.inference_mode():
            if num_tokens:
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_tokens,
                    min_new_tokens=num_tokens,
                    do_sample=False,
                )
            else:
                model(ids, use_cache=True, logits_to_keep=1)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    answer(sys.argv[1], int(sys.argv[2]))
