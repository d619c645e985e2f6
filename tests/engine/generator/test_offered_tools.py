"""Tools that a state gets after its first turns: for the templates of all notations, the prompt equals the
prompt of a conversation which had the tools from the start, with the generated tokens of its calls."""

from __future__ import annotations

import random

import pytest
from support.engine.tool_requests import ALL, AUTO, NOW, REGULAR, REQUIRED, UNSTABLE, WEATHER, calls_of
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS

from agentflow.engine.generator.context import (
    EngineContext,
    OutputTokenCache,
    PromptLimits,
    fill_conversation,
)
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.request import Origin
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolChoice, ToolSpec
from benchmarks.constrained.text_walks import text_under, walk

LIMITS = PromptLimits(TOKENIZER, RunnerInfo("x", TOKENIZER.vocab_size, 10**6, 10**6, (0,), 1, 1, ""))
STABLE = {name: template for name, template in ALL.items() if template not in UNSTABLE}
USER = Message("user", "What is the weather?")


def context_for(template: ChatTemplate) -> EngineContext:
    return EngineContext(TokenState(TOKENIZER, template), Origin("", ""), LIMITS)


def offer(
    context: EngineContext,
    template: ChatTemplate,
    tools: tuple[ToolSpec, ...] = REGULAR,
    choice: ToolChoice = AUTO,
) -> None:
    context.offer_tools(template, Conversation((), tools, choice))


def say(context: EngineContext, message: Message) -> None:
    context.begin_role(message.role, message.tool_call_id, message.name)
    context.fill(message.content)
    context.end_role()


def generate_calls(context: EngineContext, rng: random.Random) -> Message:
    """The assistant's turn: calls as a model would generate them under the constraint."""
    assert context.tools is not None
    compiled = compile_constraint(context.tools.constraint().check())
    text = None
    while text is None:
        text = walk(text_under(compiled), rng)
    output = context.tools.output()
    calls = calls_of(output.push(text.decode()) + output.finish())
    message = Message("assistant", "", True, tuple(calls))
    context.begin_role("assistant")
    context.tokens.generated(TOKENIZER.encode(text.decode(), continues=True), text.decode())
    context.tokens.called(message)
    context.end_role()
    return message


def whole(template: ChatTemplate, messages: list[Message], tools: tuple[ToolSpec, ...] = REGULAR) -> str:
    context = context_for(template)
    conversation = Conversation(tuple(messages), tools)
    fill_conversation(context, conversation, template, OutputTokenCache())
    return context.tokens.text_view()


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize("system", [None, Message("system", "Be brief.")])
def test_a_state_with_offered_tools_is_the_conversation(name: str, system: Message | None):
    template, rng = STABLE[name], random.Random(5)
    messages = [system, USER] if system is not None else [USER]
    context = context_for(template)
    for message in messages:
        say(context, message)
    context.tokens.cut()  # settled before it has tools
    for number in range(3):
        offer(context, template, choice=REQUIRED)
        called = generate_calls(context, rng)
        messages.append(called)
        for call in called.tool_calls:
            messages.append(Message("tool", f"rain {number}", tool_call_id=call.id, name=call.name))
            say(context, messages[-1])
        branch = context.fork(context.origin)
        branch.begin_role("assistant")
        assert branch.tokens.ids()
        assert without_space(branch.tokens.text_view()) == whole(template, messages)
    messages += [Message("assistant", "It rains."), Message("user", "Thanks.")]
    say(context, messages[-2])
    say(context, messages[-1])
    context.begin_role("assistant")
    assert without_space(context.tokens.text_view()) == whole(template, messages)


def without_space(text: str) -> str:
    """The text without spaces: one template writes a space before each content, and none before calls."""
    return text.replace("] [TOOL_CALLS]", "][TOOL_CALLS]")


@pytest.mark.parametrize("name", ALL)
def test_other_tools_replace_the_first_ones(name: str):
    template = ALL[name]
    context = context_for(template)
    offer(context, template)
    say(context, USER)
    offer(context, template, (NOW,))
    context.begin_role("assistant")
    assert context.tokens.text_view() == whole(template, [USER], (NOW,))
    assert context.tools is not None
    assert context.tools.callable_names == ("now",)


@pytest.mark.parametrize("name", ALL)
def test_the_same_tools_with_another_choice_leave_the_prompt_as_it_is(name: str):
    template = ALL[name]
    context = context_for(template)
    say(context, USER)
    offer(context, template, choice=REQUIRED)
    context.begin_role("assistant")
    before = context.tokens.ids()
    offer(context, template, choice=ToolChoice("none"))
    assert context.tokens.ids() == before
    assert context.tools is not None
    assert context.tools.constraint() is None


def test_generated_calls_keep_their_tokens_in_the_prompt():
    context, template = context_for(TEMPLATES["hermes"]), TEMPLATES["hermes"]
    say(context, USER)
    offer(context, template)
    context.begin_role("assistant")
    before = context.tokens.ids()
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ids = [TOKENIZER.encode(char, continues=True)[0] for char in text]
    context.tokens.generated(ids, text)
    context.tokens.called(Message("assistant", "", True, (CalledTool("c", "now", "{}"),)))
    context.end_role()
    say(context, Message("tool", "noon", tool_call_id="c", name="now"))
    context.begin_role("assistant")
    assert context.tokens.ids()[: len(before) + len(ids)] == before + ids
    assert context.tokens.num_rerendered_tokens == 0


def test_a_description_comes_with_the_first_turn_where_there_is_no_system_turn():
    template = WITHOUT_TOOLS["known_roles"]
    context = context_for(template)
    offer(context, template, (WEATHER,))
    say(context, USER)
    context.begin_role("assistant")
    assert context.tokens.text_view() == whole(template, [USER], (WEATHER,))
