"""The contexts of API backends equal plain lists of messages, however they are forked and filled."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis.generation.conversation import ApiContext, list_nodes
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.chat import CalledTool, Conversation, Message


@dataclass
class Model:
    """A state as a list: the turns that have ended, and the open one."""

    turns: list[tuple[str, str, int]] = field(default_factory=list)
    role: str = ""
    text: str = ""
    num_calls: int = 0

    def end(self) -> None:
        self.turns = [*self.turns, (self.role, self.text, self.num_calls)]
        self.role, self.text, self.num_calls = "", "", 0

    def copy(self) -> Model:
        return Model(self.turns, self.role, self.text, self.num_calls)

    def sent(self) -> list[tuple[str, str, int]]:
        is_open = bool(self.text or self.num_calls)
        return [*self.turns, *([(self.role, self.text, self.num_calls)] if is_open else [])]


def sent(context: ApiContext) -> list[tuple[str, str, int]]:
    messages = [node.message for node in context.messages()]
    return [(message.role, message.content, len(message.tool_calls)) for message in messages]


STEPS = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["begin", "begin", "text", "end", "answer", "fork"]),
    st.sampled_from(["a", "ü", "bc", ""]),
)


@given(st.lists(STEPS, min_size=20, max_size=60))
def test_contexts_equal_lists(steps: list[tuple[int, str, str]]) -> None:
    contexts, models = [ApiContext()], [Model()]
    for which, step, text in steps:
        context, model = contexts[which % len(contexts)], models[which % len(models)]
        match step:
            case "begin" if not model.role:
                model.role = "user" if len(model.turns) % 2 == 0 else "assistant"
                context.begin_role(model.role)
            case "text" if model.role:
                context.fill(text)
                model.text += text
            case "end" if model.role:
                context.end_role()
                model.end()
            case "answer" if model.role == "assistant":
                context.answer(text, (CalledTool("c", "f", "{}"),))
                model.text += text
                model.num_calls += 1
            case "fork":
                contexts.append(context.forked())
                models.append(model.copy())
            case _:
                pass
    for context, model in zip(contexts, models, strict=True):
        assert sent(context) == model.sent()
        assert context.role == (model.role or None)


def test_forks_share_messages_and_their_encodings() -> None:
    context = ApiContext()
    for number in range(3):
        context.begin_role("user")
        context.fill(f"question {number}")
        context.end_role()
    encoded: list[Message] = []

    def encode(message: Message) -> bytes:
        encoded.append(message)
        return msgspec.json.encode(message)

    forks = [context.forked() for _ in range(4)]
    bodies = {b",".join([node.encoded(encode) for node in fork.messages()]) for fork in forks}
    assert len(bodies) == 1
    assert len(encoded) == 3
    assert all(fork.last is context.last for fork in forks)


def test_long_contexts_need_no_recursion() -> None:
    context = ApiContext()
    for _ in range(20_000):
        context.begin_role("user")
        context.fill("x")
        context.end_role()
    assert len(list_nodes(context.last)) == 20_000


def test_the_text_shows_turns_and_calls() -> None:
    context = ApiContext()
    context.begin_role("user")
    context.fill("Hi")
    context.end_role()
    context.begin_role("assistant")
    context.answer("Look: ", (CalledTool("c", "f", '{"a": 1}'),))
    assert context.text() == '<user>Hi</user><assistant>Look: <call f>{"a": 1}</call>'


def test_refused_orders() -> None:
    context = ApiContext()
    with pytest.raises(BadArgument):
        context.end_role()
    context.fill("plain")
    with pytest.raises(NotSupported):
        context.begin_role("user")
    with pytest.raises(BadArgument):
        context.converse(Conversation((Message("user", "Hi"),)))
    context = ApiContext()
    context.begin_role("user")
    with pytest.raises(NotSupported):
        context.begin_role("assistant")
    with pytest.raises(NotSupported):
        context.open_answer()


def test_a_conversation_continues_its_last_answer() -> None:
    context = ApiContext()
    context.converse(Conversation((Message("user", "Hi"), Message("assistant", "Well, "))))
    assert (context.role, context.open_text) == ("assistant", "Well, ")
    context = ApiContext()
    context.converse(Conversation((Message("user", "Hi"),)))
    assert (context.role, context.open_text) == ("assistant", "")
    assert sent(context) == [("user", "Hi", 0)]


def test_text_between_turns_belongs_to_the_turn_before_it() -> None:
    context = ApiContext()
    context.begin_role("user")
    context.fill("Judgments: ")
    context.end_role()
    fork = context.forked()
    context.fill("good, ")
    context.fill("bad")
    context.begin_role("assistant")
    assert sent(context) == [("user", "Judgments: good, bad", 0)]
    assert sent(fork) == [("user", "Judgments: ", 0)]
    fork.fill("Well, ")
    fork.open_answer()
    assert sent(fork) == [("user", "Judgments: ", 0), ("assistant", "Well, ", 0)]
