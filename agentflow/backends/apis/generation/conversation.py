"""The context of a state behind an API: a list of messages, and the turn that is open.

Contexts are persistent lists: a fork shares the messages of its parent, and takes constant time. A message
keeps its encoding, so a request costs one join, and equal prefixes are equal to the byte, which the prefix
caches of providers need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN
from agentflow.backends.apis.generation.prefix_gate import PrefixGate
from agentflow.backends.apis.generation.speculation import Ahead
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.chat import (
    FREE_CHOICE,
    IMAGE_ROLES,
    CalledTool,
    Conversation,
    Message,
    ToolChoice,
    ToolSpec,
)
from agentflow.protocol.images import Image, Medium, PlacedImage, medium_kind, placed_medium
from agentflow.runtime.circuit import HasAlternative, no_alternative
from agentflow.runtime.generator import Upcoming

EncodeMessage = Callable[[Message], bytes]
"""Encodes a message as an API takes it."""


class Native(NamedTuple):
    """A message as one model's provider wants it back, with its reasoning. Another model is sent its text."""

    model: object  # the generator that made it
    encoded: bytes


class MessageNode:
    """A message and, by ``parent``, all messages before it."""

    __slots__ = ("_encoded", "gate", "length", "message", "native", "parent")

    def __init__(self, parent: MessageNode | None, message: Message, native: Native | None = None) -> None:
        self.parent = parent
        self.message = message
        self.native = native
        self.length: int = 1 if parent is None else parent.length + 1
        self._encoded: tuple[EncodeMessage, bytes] | None = None
        self.gate: PrefixGate | None = None  # before the requests of states that were forked after it

    def encoded(self, encode: EncodeMessage) -> bytes:
        """The message's encoding, with slots for its files, which is kept until another API encodes it."""
        if self.native is not None:
            return self.native.encoded
        if self._encoded is None or self._encoded[0] != encode:
            self._encoded = encode, encode(self.message)
        return self._encoded[1]

    def read_by(self, model: object) -> MessageNode:
        """The node as ``model`` reads it: without the native form of another model."""
        if self.native is None or self.native.model is model:
            return self
        node = MessageNode(self.parent, self.message)
        node.gate = self.gate
        return node


def list_nodes(last: MessageNode | None) -> list[MessageNode]:
    """The nodes up to ``last``, in order."""
    nodes: list[MessageNode] = []
    node = last
    while node is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def list_images(nodes: Sequence[MessageNode]) -> tuple[Image, ...]:
    """The files of the messages' images and videos."""
    return tuple([placed.image for node in nodes for placed in node.message.images])


def shared_gate(nodes: Sequence[MessageNode], min_tokens: int) -> PrefixGate | None:
    """The gate of the longest prefix that other states share; None if it has fewer than ``min_tokens``
    tokens, so that no cache keeps it. They are estimated by bytes, since other scripts have fewer characters
    for a token."""
    found: PrefixGate | None = None
    num_bytes = 0
    for node in nodes if any(node.gate is not None for node in nodes) else ():
        num_bytes += _num_bytes(node.message)
        if node.gate is not None and num_bytes >= min_tokens * CHARS_PER_TOKEN:
            found = node.gate
    return found


@dataclass(eq=False)
class ApiContext:
    """One state of a program behind an API.

    A state without turns is plain text. Text after a turn belongs to the turn before it if another turn
    follows, and begins the assistant's turn if a gen follows, which is then open without a role op
    (``is_implied``)."""

    cache_salt: str = ""
    program: str = ""
    model: object = None  # the generator of the next call
    has_alternative: HasAlternative = no_alternative  # whether another one can answer that call
    last: MessageNode | None = None  # of the turns that have ended
    role: str | None = None  # of the open turn
    is_implied: bool = False  # no role op opened it
    answered: tuple[str | None, str | None] = (None, None)  # the call that it answers, and the tool
    parts: list[str] = field(default_factory=list)  # its text, or the plain text
    images: tuple[PlacedImage, ...] = ()  # in its text
    calls: tuple[CalledTool, ...] = ()  # its tool calls
    has_generated: bool = False  # a model wrote some of it
    reasoning: str | None = None  # before its text
    native: Native | None = None  # all of it, as the provider wants it back
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = FREE_CHOICE
    trace: str = ""  # the ``traceparent`` of the next request
    speculates: bool | None = None  # whether a call may go on for later gens; None: the backend decides
    upcoming: Sequence[Upcoming] = ()  # the text and gens after the next gen in its turn
    ahead: Ahead | None = None  # the text of a call that went on
    is_ahead_inherited: bool = False  # it is the call of the state that was forked
    label: str = ""  # of the program

    @property
    def is_plain(self) -> bool:
        """Whether the state has text and no turns."""
        return self.last is None and self.role is None

    @property
    def has_images(self) -> bool:
        """Whether a message has an image."""
        return bool(self.images) or any(node.message.images for node in list_nodes(self.last))

    @property
    def open_text(self) -> str:
        """The text of the open turn, or the plain text."""
        if len(self.parts) > 1:
            self.parts[:] = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""

    def fill(self, text: str) -> None:
        """Appends text."""
        if text:
            self.parts.append(text)
            self.native = None

    def show(self, medium: Medium) -> None:
        """Appends an image or a video. ``NotSupported`` outside turns of the user and of tools."""
        if self.role not in IMAGE_ROLES:
            where = "outside a turn" if self.role is None else f"in a turn of the {self.role}"
            raise NotSupported(f"a model behind an API takes no image {where}: put it into af.user(…)")
        self.images += (placed_medium(len(self.open_text), medium),)
        self.native = None

    def begin_role(self, role: str, answered: tuple[str | None, str | None] = (None, None)) -> None:
        """Opens a turn. ``NotSupported`` after plain text."""
        if self.is_implied:
            self.end_role()
        if self.role is not None:
            raise NotSupported(f"a {role} turn cannot begin within the {self.role} turn: end that first")
        if self.parts and self.last is None:
            raise NotSupported(
                "a model behind an API takes turns or plain text, and this state begins with plain text: put "
                "the text into af.system(…) or af.user(…)"
            )
        if self.parts and self.last is not None:
            before = self.last.message
            added = msgspec.structs.replace(before, content=before.content + self.open_text)
            self.last = MessageNode(self.last.parent, added)
        self._open(role, answered)

    def _open(
        self, role: str, answered: tuple[str | None, str | None] = (None, None), *, is_implied: bool = False
    ) -> None:
        self.role, self.answered, self.is_implied = role, answered, is_implied
        self.parts, self.calls, self.has_generated, self.reasoning = [], (), False, None
        self.native, self.images = None, ()

    def end_role(self) -> None:
        """Ends the open turn. ``BadArgument`` if there is none."""
        if self.role is None:
            raise BadArgument("there is no open turn to end")
        self.last = MessageNode(self.last, self.open_message(), self.native)
        self.role, self.is_implied, self.parts, self.calls, self.images = None, False, [], (), ()

    def open_message(self) -> Message:
        """The open turn so far."""
        assert self.role is not None
        return Message(
            self.role,
            self.open_text,
            self.has_generated,
            self.calls,
            *self.answered,
            self.reasoning,
            self.images,
        )

    def open_answer(self) -> None:
        """Prepares for a generated text: after turns, it is the assistant's. ``NotSupported`` in the turn of
        another role."""
        if self.role is None and self.last is not None:
            parts = self.parts
            self._open("assistant", is_implied=True)
            self.parts = parts
        if self.role not in (None, "assistant"):
            raise NotSupported(
                f"a model behind an API writes the assistant's turns only, and a {self.role} turn is open"
            )

    def answer(
        self,
        text: str,
        calls: tuple[CalledTool, ...] = (),
        reasoning: str | None = None,
        native: bytes | None = None,
    ) -> None:
        """Appends a generated answer. ``native``: as the provider wants it back."""
        is_whole = native is not None and not self.open_text and not self.calls
        self.native = Native(self.model, native) if is_whole and native is not None else None
        if text:
            self.parts.append(text)
        self.calls += calls
        self.has_generated = True
        self.reasoning = reasoning or self.reasoning

    def converse(self, conversation: Conversation) -> None:
        """Begins with a conversation. ``BadArgument`` if there is content already."""
        if self.last is not None or self.role is not None or self.parts:
            raise BadArgument("a conversation must come first: this state already has content")
        self.tools, self.choice = conversation.tools, conversation.choice
        *before, final = conversation.messages or (Message("assistant", ""),)
        if final.role != "assistant" or final.tool_calls:
            before, final = [*before, final], Message("assistant", "")
        for message in before:
            self.last = MessageNode(self.last, message)
        self._open("assistant")
        self.fill(final.content)
        self.has_generated, self.reasoning = final.generated, final.reasoning

    def messages(self, *, with_open: bool = True) -> list[MessageNode]:
        """The turns that have ended, and the open one if it has content, as ``model`` reads them."""
        nodes = list_nodes(self.last)
        if with_open and self.role is not None and (self.open_text or self.calls or self.images):
            nodes.append(MessageNode(self.last, self.open_message(), self.native))
        return [node.read_by(self.model) for node in nodes]

    @property
    def num_unsent_bytes(self) -> int:
        """The size of the text after the last turn that the model has written, which no provider has seen."""
        num_bytes, node = 0, self.last
        while node is not None and not node.message.generated:
            num_bytes += _num_bytes(node.message)
            node = node.parent
        return num_bytes

    def share(self) -> None:
        """Notes that several states of the program continue from here."""
        if self.last is not None and self.last.gate is None:
            self.last.gate = PrefixGate()

    def forked(self) -> ApiContext:
        """A context that continues from here and shares the messages."""
        parts = [self.open_text] if self.parts else []
        return replace(self, parts=parts, trace="", upcoming=(), ahead=None)

    def leave_ahead(self) -> None:
        """Takes nothing more from the call that went on, which ends with its last user."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.num_users -= 1
            if not ahead.num_users:
                ahead.scope.cancel()
                if ahead.answer is not None:
                    ahead.leave(0)

    def check_decidable(self) -> None:
        """``BadArgument`` in the assistant's turn."""
        if self.role == "assistant":
            raise BadArgument("decide: the assistant's turn is open: end it first, or decide before it")

    def asked(self, question: str) -> ApiContext:
        """A context in which the user asks a question after this one. ``NotSupported`` after plain text,
        ``BadArgument`` in the assistant's turn."""
        if self.is_plain and self.parts:
            raise NotSupported(
                "decide: a model behind an API decides about turns, and this state has plain text: put "
                "the text into af.user(…)"
            )
        self.check_decidable()
        asked = self.forked()
        if asked.role is not None:
            asked.end_role()
        last = asked.last
        if (
            last is not None and last.message.role == "user"
        ):  # some servers refuse two turns of the user in a row
            before = last.message
            question = f"{before.content}\n\n{question}"
            asked.last = MessageNode(last.parent, msgspec.structs.replace(before, content=question))
        else:
            asked.last = MessageNode(last, Message("user", question))
        return asked

    def text(self) -> str:
        """The content, with turns as ``<role>…</role>``: the provider's own markup is not known."""
        written = [f"{_shown(node.message)}</{node.message.role}>" for node in list_nodes(self.last)]
        if self.role is not None:
            written.append(_shown(self.open_message()))
        else:
            written.append(self.open_text)
        return "".join(written)


def _shown(message: Message) -> str:
    calls = [f"<call {call.name}>{call.arguments}</call>" for call in message.tool_calls]
    texts = [part if isinstance(part, str) else f"<{medium_kind(part)}>" for part in message.parts]
    return f"<{message.role}>{''.join(texts)}{''.join(calls)}"


IMAGE_TOKENS = 1_000
"""About the tokens of an image of a megapixel, with which the providers count their prices."""
MAX_IMAGE_TOKENS = 50_000
"""The most tokens of an image: the small models of OpenAI count a large one 33 times."""


PICTURES_OF_VIDEO = 32
"""As many images a video counts as: its server chooses the frames."""


def _num_bytes(message: Message) -> int:
    """The size of a message, in which an image counts by its tokens."""
    return len(message.content.encode(errors="surrogatepass")) + _chars_of_media(message)


def _chars_of_media(message: Message) -> int:
    pictures = sum([PICTURES_OF_VIDEO if placed.video else 1 for placed in message.images])
    return pictures * IMAGE_TOKENS * CHARS_PER_TOKEN


def count_chars(message: Message) -> int:
    """The characters of a message, in which an image counts by its tokens."""
    return len(message.content) + _chars_of_media(message)


def prefix_key(*parts: bytes) -> str:
    """A short key for the cache of a provider."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def call_item(call: CalledTool) -> dict[str, Any]:
    """A tool call as an item of the responses API and of the decisions API."""
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
