"""The cost model of an engine, from two requests on it.

A request over many tokens gives the time of a token, and the steps of a generation the time of a step. A step
reads all weights once, so the time to read a token's KV follows from its size. The other costs have the ratio
to these that they have on the default model.
"""

from __future__ import annotations

import time

from agentflow.cluster.routing.load import EngineShape
from agentflow.engine.client import EngineClient
from agentflow.engine.request import Origin
from agentflow.engine.simulator.cost_model import CostModel, default_cost
from agentflow.protocol.sampling import SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 8
LEAST_S = 1e-7
_ORIGIN = Origin(cache_salt="measured cost", is_extra=True)


async def measured_shape(
    client: EngineClient, *, max_running: int, tpot_target_ms: int | None = None
) -> EngineShape:
    """Measures an engine that does nothing else. Takes the time of two prompts of up to ``PROMPT_TOKENS``
    tokens and two short generations."""
    info = client.info
    num_tokens = max(2, min(PROMPT_TOKENS, info.max_context // 2, info.num_slots // 4))
    # Different first tokens, so that nothing of a prompt is cached. The first request of a kind is slow.
    prompts = [[token, *[0] * (num_tokens - 1)] for token in (1, 2)]
    prompt_s = 0.0
    for prompt in prompts:
        began_s = time.perf_counter()
        if info.embedding_size:
            await client.embed(prompt, origin=_ORIGIN)
        else:
            await client.compute(prompt, origin=_ORIGIN)
        prompt_s = time.perf_counter() - began_s
    step_s = prompt_s / num_tokens
    if not info.embedding_size:
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for prompt in prompts:
            began_s = time.perf_counter()
            await client.generate(prompt, params, seed=0, origin=_ORIGIN)
            step_s = (time.perf_counter() - began_s) / OUTPUT_TOKENS
    return EngineShape(
        _cost(prompt_s / num_tokens, step_s, info.kv_bytes_per_token / max(1, info.weight_bytes)),
        max_running=max_running,
        kv_tokens=info.num_slots,
        tpot_s=float("inf") if tpot_target_ms is None else tpot_target_ms / 1e3,
        keeps_tpot=tpot_target_ms is not None,
    )


def _cost(token_s: float, step_s: float, kv_part: float) -> CostModel:
    """``kv_part``: the bytes of a token's KV, relative to the weights."""
    default = default_cost()
    row_s = max(token_s, LEAST_S)
    base_s = max(step_s - row_s, LEAST_S)
    return CostModel(
        base_s=base_s,
        row_s=row_s,
        logits_s=row_s * default.logits_s / default.row_s,
        read_s=base_s * kv_part,
        pair_s=row_s * default.pair_s / default.row_s,
    )
