"""A request as the router sees it: its tokens, and an estimate of its output."""

from __future__ import annotations

import numpy as np

from agentflow.cluster.routing.load import RoutedRequest
from agentflow.engine.cache.token_run import TokenRun, token_run
from agentflow.engine.media_run import MediaRun, lead_tokens, pseudo_tokens, with_leads
from agentflow.engine.request import CacheKey, Submit


def router_call(submit: Submit) -> RoutedRequest:
    """Returns the router's record of a request, or of the rest of a request that another engine has begun."""
    origin = submit.origin
    is_generation = submit.params is not None and not submit.score_from
    return RoutedRequest(
        submit.request_id,
        CacheKey(origin.tenant, origin.cache_salt, submit.adapter),
        _tokens(submit),
        output_tokens=origin.output_tokens if is_generation else 1,
        objective="throughput" if origin.is_ahead else origin.objective,
        tenant=origin.tenant,
        adapter=submit.adapter,
        task_group=origin.task_group or None,
        program=(origin.tenant, origin.program) if origin.program else None,
    )


def _tokens(submit: Submit) -> TokenRun:
    """Returns the tokens under which the engine caches the request."""
    tokens = np.array([*submit.token_ids, *submit.generated_ids], dtype=np.int32)
    media = [MediaRun.of(submitted) for submitted in submit.media]
    for run in media:
        tokens[run.start : run.end] = pseudo_tokens(run)
    return token_run(with_leads(tokens, lead_tokens(tokens, media)))
