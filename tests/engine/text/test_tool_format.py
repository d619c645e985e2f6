"""How models write tool calls, found out by asking their templates."""

from __future__ import annotations

import json

import pytest
from support.engine.tool_template_shapes import LLAMA, MISTRAL, TEMPLATES, TOKENS, WITHOUT_TOOLS

from agentflow.engine.text.chat_template import ChatTemplate, ToolDialect
from agentflow.engine.text.tool_format import FALLBACK, ToolFormat, as_plain_messages, tool_format
from agentflow.errors import NotSupported
from agentflow.protocol.chat import CalledTool, Message, ToolSpec

HERMES_FORM = ToolFormat("<tool_call>\n", "\n</tool_call>")
MISTRAL_FORM = ToolFormat("[TOOL_CALLS] ", "", is_list=True, before="", between=None, lead=" ")
FORMS = {
    "hermes": (HERMES_FORM, ToolDialect("object")),
    "thinking_hermes": (HERMES_FORM, ToolDialect("text")),
    "spaced_hermes": (
        ToolFormat("<tool_call>\n", "\n</tool_call> ", name_first=False, whitespace="free"),
        ToolDialect("object"),
    ),
    "llama": (ToolFormat("", "", arguments_key="parameters", before="", between=None), ToolDialect("object")),
    "mistral": (MISTRAL_FORM, ToolDialect("object", short_ids=True)),
    "mistral_with_ids": (MISTRAL_FORM, ToolDialect("object", short_ids=True)),
    "by_parameter": (
        ToolFormat("<call>", "</call>", name_first=False, before="", between=""),
        ToolDialect("text"),
    ),
}
WEATHER = ToolSpec("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}})
TIME = ToolSpec("time", "Tells that.", {"type": "object"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_of_templates(name: str) -> None:
    form, dialect = FORMS[name]
    assert tool_format(TEMPLATES[name]) == form
    assert TEMPLATES[name].dialect == dialect


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_templates_that_know_no_tools(name: str) -> None:
    assert tool_format(WITHOUT_TOOLS[name]) == FALLBACK


def test_a_model_without_a_template() -> None:
    assert tool_format(ChatTemplate(None)) == FALLBACK


def test_other_forms_of_a_call() -> None:
    """Members that are always the same, tight JSON, and JSON that is no JSON of a call."""
    calls = '{"type": "function", "name": "\' + call.name + \'", "parameters": '
    for written, expected in (
        (calls, {"constants": (("type", "function"),)}),
        ('{"name":"\' + call.name + \'","parameters":', {"whitespace": "tight"}),
        ('{ "name": "\' + call.name + \'", "parameters": ', {"whitespace": "free"}),
    ):
        form = tool_format(
            ChatTemplate(LLAMA.replace('{"name": "\' + call.name + \'", "parameters": ', written), TOKENS)
        )
        assert form.is_native
        assert {key: getattr(form, key) for key in expected} == expected
    as_function = ChatTemplate(
        LLAMA.replace('{"name": "\' + call.name + \'", "parameters": ', '" + call.name + "(')
    )
    assert tool_format(as_function) == FALLBACK


def test_a_template_that_hides_a_part_of_tools_supports_none() -> None:
    without_results = MISTRAL.replace("message.content | tojson", "'hidden'")
    without_tools = MISTRAL.replace("tools | tojson", "'hidden'")
    assert tool_format(ChatTemplate(without_results, TOKENS)) == FALLBACK
    assert tool_format(ChatTemplate(without_tools, TOKENS)) == FALLBACK


@pytest.mark.parametrize("name", ["hermes", "thinking_hermes", "llama", "mistral", "by_parameter"])
@pytest.mark.parametrize("content", ["", "I look."])
def test_calls_are_written_as_the_format_says(name: str, content: str) -> None:
    form = FORMS[name][0]
    count = 2 if form.allows_several else 1
    arguments = ['{"city":"Oslo", "days": 1.0}', '{"city": "\\u00e9"}'][:count]
    calls = tuple(CalledTool(f"call_{n}", "weather", text) for n, text in enumerate(arguments))
    objects = []
    for text in arguments:
        members = [f'"{form.name_key}": "weather"', f'"{form.arguments_key}": {text}']
        objects.append("{" + ", ".join(members if form.name_first else members[::-1]) + "}")
    if form.is_list:
        written = f"{form.begin}[{', '.join(objects)}]{form.end}"
    else:
        written = (form.between or "").join([f"{form.begin}{one}{form.end}" for one in objects])
    messages = [Message("user", "?"), Message("assistant", content, tool_calls=calls)]
    text = TEMPLATES[name].render(messages)
    assert written in text
    if content in text and content:
        assert f"{content}{form.before}{written}" in text


def test_tools_and_calls_as_contents() -> None:
    template = WITHOUT_TOOLS["chatml"]
    calls = (CalledTool("1", "weather", '{"city":"Oslo"}'), CalledTool("2", "time", "{}"))
    messages = [
        Message("user", "Weather?"),
        Message("assistant", "I look.", tool_calls=calls),
        Message("tool", "rain", tool_call_id="1"),
        Message("tool", "noon", tool_call_id="2"),
        Message("user", "Thanks."),
        Message("assistant", "", tool_calls=calls[1:]),
    ]
    system, *rest = as_plain_messages(messages, [WEATHER, TIME], template)
    assert (system.role, len(rest)) == ("system", 4)
    lines = system.content.split("\n")
    shown = [json.loads(line) for line in lines[lines.index("<tools>") + 1 : lines.index("</tools>")]]
    assert [tool["name"] for tool in shown] == ["weather", "time"]
    assert shown[0]["parameters"] == WEATHER.parameters
    call = '<tool_call>{"name": "weather", "arguments": {"city":"Oslo"}}</tool_call>'
    other = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    response = "<tool_response>\n{}\n</tool_response>"
    assert rest == [
        Message("user", "Weather?"),
        Message("assistant", f"I look.\n{call}\n{other}"),
        Message("user", f"{response.format('rain')}\n{response.format('noon')}\nThanks."),
        Message("assistant", other),
    ]
    template.render([system, *rest])


def test_the_system_turn_that_lists_tools() -> None:
    user = Message("user", "?")
    (system, _) = as_plain_messages([Message("system", "Be brief."), user], [TIME], WITHOUT_TOOLS["chatml"])
    assert system.content.startswith("Be brief.\n\nYou can call these tools:\n<tools>\n")
    (only,) = as_plain_messages([user], [TIME], WITHOUT_TOOLS["known_roles"])
    assert only.role == "user"
    assert only.content.startswith("You can call these tools:")
    assert only.content.endswith("</tool_call>\n\n?")
    assert as_plain_messages([user], [], WITHOUT_TOOLS["chatml"]) == (user,)
    with pytest.raises(NotSupported):
        WITHOUT_TOOLS["known_roles"].render([Message("system", "x"), user])


def test_a_turn_of_many_results_is_put_together_once():
    """The cost of each result depends on its own text, not on all texts before it."""
    answered = Message("tool", "x" * 50)
    [turn] = as_plain_messages([answered] * 200_000, [], WITHOUT_TOOLS["chatml"])
    one = "<tool_response>\n" + "x" * 50 + "\n</tool_response>"
    assert len(turn.content) == 200_000 * (len(one) + 1) - 1
    assert turn.content.startswith(f"{one}\n{one}\n")
