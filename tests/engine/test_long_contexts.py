"""A model with a context of 131,072 tokens and a pool of 128,000, filled by one prompt: the memory of a
batch grows with the context, never with its square."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from support.engine.random_model import write_random_model

from agentflow.engine.client import EngineClient
from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.protocol.sampling import SamplingParams

CONTEXT, POOL, PROMPT = 131_072, 128_000, 127_000
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}


def reset_peak() -> int:
    """The resident memory of this process, from which its peak starts again."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most resident memory of this process since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_prompt_of_127_000_tokens(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, max_position_embeddings=CONTEXT, **SIZES)
    options = EngineOptions(str(folder), dtype="bfloat16", kv_tokens=POOL, token_budget=4096, threads=2)
    prompt = [10 + i * i % 251 for i in range(PROMPT)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def generate(client: EngineClient, count: int) -> tuple[list[int], int]:
        end = await client.generate(prompt[:count], params, seed=0, on_text=lambda _: None)
        return end.token_ids, end.cached_tokens

    async def main() -> None:
        async with open_engine(options) as client:
            assert client.info.max_context == CONTEXT
            await generate(client, 300)
            before = reset_peak()
            whole, _ = await generate(client, PROMPT)
            assert peak_bytes() - before < 200e6  # one byte for each pair of tokens would be 16 GB
            assert await generate(client, PROMPT) == (whole, PROMPT - 1)

    anyio.run(main)
