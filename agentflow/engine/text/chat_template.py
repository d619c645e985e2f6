"""A model's chat template: Jinja source from its folder, rendered as transformers renders it.

How a rendering is taken apart into markup and contents is in ``chat_layout``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentflow.engine.text.chat_values import (
    Mark,
    ToolDialect,
    message_values,
    to_json,
    tool_values,
    unmarked,
)
from agentflow.engine.text.tokenizer_files import chat_template_source, named_special_tokens
from agentflow.engine.text.tool_dialect import find_dialect
from agentflow.errors import BadModelFolder, NotSupported
from agentflow.protocol.chat import Message, ToolSpec


class ChatTemplate:
    """``source`` is the template's Jinja text, None where the model has none. ``special_tokens`` are
    given to the template by name, such as ``{"bos_token": "<s>"}``."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "the chat template",
    ) -> None:
        """Raises ``BadModelFolder`` for a source that is no valid Jinja; the message calls it ``where``."""
        self.special_tokens = dict(special_tokens or {})
        self.source = source or ""
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModelFolder(
                f"{where} is no valid Jinja template (line {error.lineno}): {error}"
            ) from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Reads the folder's default chat template, if it has one. Raises ``BadModelFolder``."""
        return cls(
            chat_template_source(folder), named_special_tokens(folder), where=f"the chat template in {folder}"
        )

    @property
    def has_template(self) -> bool:
        """Whether the model can hold a conversation in roles."""
        return self._template is not None

    @cached_property
    def dialect(self) -> ToolDialect:
        """How it wants tool calls: found by trying, at the first conversation that has some."""
        return find_dialect(lambda messages, dialect: self.render(messages, dialect=dialect))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        add_generation_prompt: bool = False,
        now: datetime | None = None,
        dialect: ToolDialect | None = None,
        mark: Mark = unmarked,
    ) -> str:
        """The conversation as the model reads it. ``now``: what the template takes for the present time.
        ``dialect``: None is the template's own. ``mark`` is put on all that is said in tools and calls.

        Raises ``NotSupported`` where there is no template, or where it refuses these messages, and
        ``BadArgument`` for a tool call whose arguments are no JSON object.
        """
        if self._template is None:
            raise NotSupported("this model has no chat template: use plain text instead of roles")
        moment = now or datetime.now()
        if dialect is None:
            has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
            dialect = self.dialect if has_calls else ToolDialect()
        values = message_values(messages, dialect, mark)
        try:
            return self._template.render(
                **self.special_tokens,
                messages=values,
                tools=tool_values(tools, mark),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=moment.strftime,
            )
        except Exception as error:  # a template is a program, and fails as programs do
            roles = ", ".join(message.role for message in messages) or "none"
            raise NotSupported(
                f"the model's chat template refuses turns of these roles ({roles}): {error}"
            ) from error

    def turn_markup(self) -> str:
        """What the template writes around turns of a user and an assistant; empty where it refuses them."""
        marker = secrets.token_hex(16)
        turns = [Message(role, marker) for role in ("user", "assistant", "user")]
        try:
            return self.render(turns).replace(marker, "\0")
        except NotSupported:
            return ""


class _Generation(jinja2.ext.Extension):
    """Reads ``{% generation %}…{% endgeneration %}``, which marks what a model wrote, as just its body."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that Jinja asks for)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict`` as templates may use it: to make one, without its other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    given: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "dict": _Dict()}
    environment.globals.update(given)
    return environment
