"""Whether a request could ever run: told when it comes, and not when it has waited."""

from __future__ import annotations

from agentflow.engine.request import Request
from agentflow.engine.token_tree import TokenTree
from agentflow.errors import PromptTooLong


def check_size(request: Request, max_total_tokens: int, total_slots: int) -> None:
    """``PromptTooLong`` where it could not. ``max_total_tokens``: of a sequence, its output included."""
    if request.tree is not None:
        _check_tree(request.num_prompt, request.tree, max_total_tokens, total_slots)
    elif request.num_prompt + (1 if request.max_new_tokens else 0) > max_total_tokens:
        raise PromptTooLong(
            f"the prompt has {request.num_prompt} tokens; with its output it must fit into "
            f"{max_total_tokens} (the smaller of the model's context and the KV pool): shorten it"
        )


def _check_tree(num_prompt: int, tree: TokenTree, max_total_tokens: int, total_slots: int) -> None:
    if num_prompt + tree.longest > max_total_tokens:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens; with the {tree.longest} of its longest choice it must "
            f"fit into {max_total_tokens} (the smaller of the model's context and the KV pool): shorten it"
        )
    if num_prompt + tree.num_nodes > total_slots:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and its choices {tree.num_nodes} to compute; "
            f"together they must fit into the KV pool of {total_slots}: offer fewer or shorter choices"
        )
