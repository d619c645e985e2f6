"""Finds the tokens with which a model ends an answer, from all sources.

``config.json``, ``generation_config.json``, the tokenizer and the chat template may each have different ones,
and a model may end with any of them: if one is missed, the model generates up to its limit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentflow.engine.text.channels import ANSWER_ENDS, MESSAGE_END
from agentflow.engine.text.chat_layout import lay_out
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import AgentflowError
from agentflow.protocol.chat import Message

logger = logging.getLogger(__name__)


def all_end_ids(of_model: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """Joins the end tokens of the model's files with the tokens of the tokenizer and the template, and warns
    about tokens that the files do not have."""
    found = dict.fromkeys(of_model)
    others = [("the tokenizer", tokenizer.eos_id), ("the chat template", _closing_id(tokenizer, template))]
    if template.has_channels:
        between = tokenizer.find_id(MESSAGE_END)  # ends a message, not the answer
        others = [(source, token) for source, token in others if token != between]
        ends = map(tokenizer.find_id, ANSWER_ENDS)
        others += [("the notation of channels", token) for token in ends if token in tokenizer.closed_ids]
    for source, token in others:
        if token is not None and token not in found:
            found[token] = None
            if of_model:
                logger.warning(
                    "%s ends a text with %r, which the model's files do not list: it ends answers here too",
                    source,
                    tokenizer.list_texts([token])[0],
                )
    return tuple(found)


def _closing_id(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Returns the special token after the assistant's text in a conversation; None if there is none."""
    if not template.has_template:
        return None
    try:
        layout = lay_out(template, [Message("user", "Hello."), Message("assistant", "Hi.")])
    except AgentflowError:  # a template of other roles, whose errors are reported when it is used
        return None
    if not layout.shown:
        return None
    closing = tokenizer.encode_markup(layout.text[layout.shown[-1].end :].lstrip())
    return closing[0] if closing and closing[0] in tokenizer.closed_ids else None
