"""Scores a select's choices on the engine: all of them in one forward pass."""

from __future__ import annotations

import msgspec

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import EngineContext
from agentflow.engine.process.ipc import Finished
from agentflow.engine.text.choices import EncodedChoices, scores_of


async def select_scores(
    client: EngineClient, context: EngineContext, encoded: EncodedChoices, method: str
) -> tuple[list[float], Finished]:
    """The score of each choice by ``method``, and the end of the request that scored them."""
    end = await client.score_choices(encoded.prefix, encoded.ends, origin=context.origin_now())
    unconditional: list[list[float]] = []
    if method == "unconditional_likelihood_normalized":
        # Not as a request of the state, whose next request will continue its prompt instead.
        origin = msgspec.structs.replace(context.origin_now(), state=0)
        alone = await client.score_choices(_start_ids(client), encoded.ends, origin=origin)
        unconditional = alone.choice_logprobs
    return scores_of(method, encoded.ends, end.choice_logprobs, unconditional), end


def _start_ids(client: EngineClient) -> list[int]:
    """The tokens before a text at the start of a sequence."""
    bos = client.tokenizer.bos_id
    return [bos if bos is not None else client.info.end_token_ids[0]]
