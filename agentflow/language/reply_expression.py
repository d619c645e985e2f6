"""``reply``: what the assistant says after a conversation, tool calls included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from agentflow.language.expressions import GenExpression, check_name
from agentflow.language.gen import JsonOptions, gen
from agentflow.protocol.reply import Reply, read_reply


def reply(
    name: str,
    *,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    **options: Unpack[JsonOptions],
) -> GenExpression[Reply]:
    """What the assistant says after ``af.conversation``, as variable ``name``: prose, and calls of the
    conversation's tools, whatever notation the model has for those. Calls are valid under their tools'
    schemas. What ``max_tokens`` cut off is a reply, too: its last call may be incomplete.

    ``regex``, ``schema``, ``choices`` and ``grammar`` say what a reply is that calls no tool: it then has
    either calls and nothing else, or such a text. The other parameters are those of ``gen``.

    The text of the variable is the prose: iterating gives that as it comes, and it is what f-strings,
    transforms, ``join`` and other states take. ``s["answer"].partials()`` gives a ``Reply`` with the calls,
    too, each further than the one before. ``s.messages()`` has the calls as its turn's ``tool_calls``.

    >>> async with flow.state() as s:
    ...     s += af.conversation(
    ...         [{"role": "user", "content": "What is the weather in Oslo?"}], tools=[weather]
    ...     )
    ...     answer = af.reply("answer")
    ...     s += answer
    ...     async for reply in s[answer].partials():
    ...         print(reply.text, reply.tool_calls)
    ...     reply = await s[answer]
    """
    check_name(name, "reply")
    asked: dict[str, Any] = {
        "regex": regex,
        "schema": schema,
        "choices": choices,
        "grammar": grammar,
        **options,
    }
    written = gen(name, **asked)
    kind = replace(written.value_type, shown="reply", read=read_reply, comes_in_parts=False, is_reply=True)
    return GenExpression(name, written.params, kind, written.timeout_s)
