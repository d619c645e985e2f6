"""A small model with random weights on a real server, and transformers' scores of it.

Run with the interpreter of the repository's environment. It prints the server's address. For each line of its
standard input, a context and its continuation in JSON, it prints the continuation's log-probability and
whether greedy decoding writes it, as transformers computes them. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.commands import served
from support.engine.random_model import write_random_model


class Scorer:
    """The model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """Without a context, the continuation's first token is not scored."""
        start = len(self._tokenizer.encode(context)) or 1
        ids = torch.tensor(self._tokenizer.encode(context + continuation))
        with torch.inference_mode():
            rows = self._model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1]
        scores = rows[torch.arange(len(rows)), ids[start:]]
        return float(scores.sum()), bool((scores == rows.max(-1).values).all())


def main() -> None:
    with TemporaryDirectory() as name:
        folder = write_random_model(Path(name), max_position_embeddings=1024)
        scorer = Scorer(folder)
        options = ("--model", f"scored={folder}", "--dtype", "float32", "--kv-tokens", "20000")
        with served(*options) as (url, _):
            print(url.replace("ws", "http", 1), flush=True)
            for line in sys.stdin:
                print(json.dumps(scorer.score(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
