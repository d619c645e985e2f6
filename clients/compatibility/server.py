"""The server that other clients are tested with: the real APIs and engine, on a model that acts as an agent
would.

The model calls the first tool of the prompt, answers once it has a result, and otherwise repeats the last
message. Where a grammar excludes that, it writes the shortest text that the grammar allows. Run with the
interpreter of the repository's environment: it prints the address, and ends with its standard input.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.api_server import api_server
from support.fake_engine import TOKENIZER, FakeEngine

from agentflow.engine.batch import BatchOutput, SampledRows
from agentflow.engine.grammar.grammar import is_allowed
from agentflow.engine.simulator.fake_runner import FakeRunner, masks_by_row

END = 1
TURN = "<|im_start|>"
ANSWER = "It is sunny in Oslo."
FINAL = re.compile("final|answer|submit|result|output|done", re.IGNORECASE)
# What ends a value comes first, then what a value has to have.
SHORTEST = '"}],:{[1tfna-.e0 '


def _one_token(text: str) -> int:
    return TOKENIZER.encode(text, continues=True)[0]


_PREFERRED = [END, *(_one_token(char) for char in SHORTEST), *range(2, TOKENIZER.vocab_size)]


def script(prompt: str) -> str:
    """What the model writes after a prompt: the whole turn."""
    tools = [json.loads(line)["name"] for line in _between(prompt, "<tools>\n", "</tools>").splitlines()]
    said = prompt.split(TURN)[-2].partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>").strip()
    if "sunny" in said:  # some frameworks give results as the user's words
        final = [name for name in tools if FINAL.search(name)]
        return _call(final[0]) if final else ANSWER
    return _call(tools[0]) if tools else said


def _between(text: str, begin: str, end: str) -> str:
    return text.partition(begin)[2].partition(end)[0]


def _call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}</tool_call>'


class ScriptedRunner(FakeRunner):
    """Follows the script as far as the grammar allows."""

    def choose(self, seen: list[NDArray[np.int64]], sampled: SampledRows) -> BatchOutput:
        masks, targets = masks_by_row(sampled.masks), sampled.target_ids.copy()
        for row, tokens in enumerate(seen):
            if targets[row] < 0:
                mask = masks.get(row)
                targets[row] = next(one for one in _wanted(tokens) if mask is None or is_allowed(mask, one))
        return super().choose(seen, replace(sampled, target_ids=targets))


def _wanted(tokens: NDArray[np.int64]) -> Iterator[int]:
    text = TOKENIZER.decode(tokens, skip_special=False, continues=True)
    prompt, mark, written = text.rpartition(f"{TURN}assistant\n")
    whole = script(prompt + TURN) if mark else ""
    if whole.startswith(written):
        yield _one_token(whole[len(written) :]) if len(whole) > len(written) else END
    yield from _PREFERRED


def main() -> None:
    runner = ScriptedRunner(
        vocab_size=TOKENIZER.vocab_size, num_slots=400_000, max_context=65_536, end_token_ids=(END,)
    )
    with api_server(FakeEngine(runner=runner)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
