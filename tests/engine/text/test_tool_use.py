"""Requests with tools: the prompt, and the texts that the model can write."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from support.engine.tool_requests import (
    ALL,
    ANY,
    AUTO,
    CHOICES,
    NOW,
    REGULAR,
    REQUIRED,
    USER,
    calls_of,
    check,
    compile_once,
    prose_of,
    request,
    state_for,
    use_of,
)
from support.engine.tool_template_shapes import TEMPLATES
from support.examples import times
from support.faults import has_param

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.chat import CalledTool, Message, ToolChoice
from agentflow.protocol.constraint import Constraint
from agentflow.server.completion.request import TokenIds
from benchmarks.constrained.text_walks import text_under, walk


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("tools", [REGULAR, ANY], ids=["regular", "any"])
def test_texts_under_a_required_choice_are_calls(name, chosen, tools):
    choice = CHOICES[chosen]
    use = use_of(ALL[name], request(choice, tools))
    compiled = compile_once(use.constraint().check())
    assert (compiled.form == "dfa") == (tools is REGULAR or choice.name is not None)
    counts = set()
    for seed in range(times(50)):
        text = walk(text_under(compiled), random.Random(seed))
        if text is None:
            continue
        output = use.output()
        pieces = output.push(text.decode()) + output.finish()
        assert prose_of(pieces) == ""
        calls = calls_of(pieces)
        check(calls)
        counts.add(len(calls))
        assert choice.name is None or {call.name for call in calls} == {"weather"}
    assert counts == {1} or (chosen == "required" and use.form.allows_several and min(counts) == 1)


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama"])
def test_a_text_that_begins_as_a_call_is_one(name):
    use = use_of(ALL[name], request(AUTO, ANY))
    compiled = compile_constraint(use.constraint().check())
    num_calls = 0
    for seed in range(20):
        text = walk(text_under(compiled), random.Random(seed), prefix=f"So {use.form.begin}".encode())
        if text is None:
            continue
        output = use.output()
        pieces = output.push(text.decode()) + output.finish()
        check(calls_of(pieces))
        num_calls += output.num_calls
        assert pieces[0].text.startswith("So")
        assert output.num_calls >= 1
    assert num_calls >= 5


def test_one_call_in_prose_where_parallel_calls_are_off():
    use = use_of(TEMPLATES["hermes"], request(ToolChoice("auto", parallel=False)))
    assert use.constraint().max_tags == 1
    assert use_of(TEMPLATES["hermes"], request(AUTO)).constraint().max_tags is None


@pytest.mark.parametrize("name", ALL)
def test_with_choice_none_the_prompt_lists_all_tools_and_none_is_callable(name):
    constraint = Constraint("regex", "[a-z]+")
    use = use_of(ALL[name], request(ToolChoice("none")))
    assert use.constraint(constraint) == constraint
    assert "Tells the weather." in state_for(use, ALL[name]).text_view()
    output = use.output()
    text = use.form.begin + '{"name": "weather", "arguments": {}}'
    assert prose_of(output.push(text) + output.finish()) == text


def closed(value: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}


FORMS = {
    # Closed, as an object with any members may look like a bare call.
    "schema": (Constraint("schema", json.dumps(closed({"type": "boolean"}))), b'{"a'),
    "any": (Constraint("schema", json.dumps(closed({}))), b'{"a'),
    "regex": (Constraint("regex", "[a-z]{1,30}"), b"a"),
    "choices": (Constraint("choices", choices=("yes", "no")), b"y"),
    "grammar": (Constraint("grammar", 'start: "(" start? ")"'), b"("),
}


def keeps(compiled: CompiledConstraint, text: bytes) -> bool:
    growing = text_under(compiled)
    for byte in text:
        if byte not in growing.allowed():
            return False
        growing.accept(byte)
    return growing.may_end()


# Tools with any arguments have a grammar: another form next to them is compiled like "any".
FORMS_AND_TOOLS = [
    pytest.param(form, tools, id=f"{form}-{shown}", marks=[pytest.mark.full] if is_broad else [])
    for form in FORMS
    for shown, tools, is_broad in (
        ("regular", REGULAR, False),
        ("any", ANY, form not in ("schema", "any", "grammar")),
    )
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("form", "tools"), FORMS_AND_TOOLS)
def test_either_calls_or_the_requested_constraint(name, form, tools):
    otherwise, beginning = FORMS[form]
    use = use_of(ALL[name], request(AUTO, tools))
    compiled = compile_constraint(use.constraint(otherwise).check())
    plain, calls_only = (compile_once(one) for one in (otherwise, use.calls))
    is_regular = plain.form == calls_only.form == "dfa"
    assert (compiled.form == "dfa") == is_regular
    start = (use.form.mark or '{"name": "weather", "parameters": {"city": "').encode()
    for prefix, is_call in ((beginning, False), (start, True)):
        num_texts = 0
        for seed in range(5):
            text = walk(text_under(compiled), random.Random(seed), prefix=prefix)
            if text is None:
                continue
            output = use.output(otherwise)
            said = text.decode()
            found = [piece for at in range(0, len(said), 3) for piece in output.push(said[at : at + 3])]
            found += output.finish()
            if is_call and output.num_calls:
                check(calls_of(found))
                assert prose_of(found) == ""
            else:  # where a call has no mark, a text may begin like one
                assert prose_of(found) == said
                assert keeps(plain, text)
            num_texts += output.num_calls > 0 if is_call else 1
        assert num_texts


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OPEN = {
    "hermes": (CALL, Constraint("regex", "(?s).{1,400}")),
    "llama": ('{"name": "now", "parameters": {}}', Constraint("regex", r"\{[^}]{1,80}\}+")),
}


@pytest.mark.parametrize(
    ("name", "tools"),
    [("hermes", REGULAR), ("hermes", ANY), ("llama", REGULAR)],
    ids=["hermes", "hermes any", "llama"],
)
def test_a_text_that_begins_as_a_call_is_a_valid_one(name, tools):
    """Though it would be text of the form, too."""
    call, otherwise = OPEN[name]
    use = use_of(TEMPLATES[name], request(AUTO, tools))
    compiled = compile_constraint(use.constraint(otherwise))
    assert keeps(compiled, call.encode())
    assert not keeps(compiled, call.replace("{}", '{"a": 1}').encode())
    assert keeps(compile_constraint(otherwise), call.replace("{}", '{"a": 1}').encode())
    texts = [f"A {call}", f" {call}"] if name == "hermes" else ['{"name": "now"}', '{"names": "now"}']
    for text in texts:
        assert keeps(compiled, text.encode())
        output = use.output(otherwise)
        assert prose_of(output.push(text) + output.finish()) == text


@pytest.mark.parametrize(
    "otherwise",
    [
        Constraint("schema", '{"type": "object"}'),
        Constraint("grammar", "start: /(?s:.+)/"),
        Constraint("grammar", "start: ("),
        Constraint("schema", '{"type": "array", "items": {"$ref": "#/x"}}'),
    ],
)
@pytest.mark.parametrize("tools", [REGULAR, ANY], ids=["regular", "any"])
def test_a_form_indistinguishable_from_a_call_is_rejected(otherwise, tools):
    use = use_of(TEMPLATES["llama"], request(AUTO, tools))
    with pytest.raises(BadArgument, match=f"^{otherwise.kind}: ", check=has_param("instead")):
        compile_constraint(use.constraint(otherwise))


def test_words_that_begin_as_a_bare_call_are_refused_where_a_parser_reads_them():
    use = use_of(TEMPLATES["llama"], request(AUTO, ANY))
    with pytest.raises(BadArgument, match=r"^regex: ", check=has_param("instead")):
        compile_constraint(use.constraint(OPEN["llama"][1]))
    assert compile_constraint(use.constraint(Constraint("regex", "[a-z]+"))).form == "llguidance"


def test_a_form_that_no_text_has_is_rejected_with_tools_too():
    use = use_of(TEMPLATES["hermes"], request(AUTO))
    alone = Constraint("regex", "a(?=b)")
    for constraint in (alone, use.constraint(alone)):
        with pytest.raises(BadArgument):
            compile_constraint(constraint)


def test_a_form_with_bare_calls_of_any_layout_is_rejected():
    use = use_of(TEMPLATES["llama"], request(AUTO))
    loose = replace(use, form=replace(use.form, whitespace="free"))
    with pytest.raises(NotSupported):
        loose.constraint(Constraint("schema", "{}"))
    assert loose.constraint() is None


def test_an_answer_of_a_model_without_marks_comes_as_it_is_written():
    use = use_of(TEMPLATES["llama"], request(AUTO))
    output = use.output(Constraint("schema", json.dumps(closed({}))))
    assert prose_of(output.push('{"a": ')) == '{"a": '


def test_a_required_call_has_no_prose():
    use = use_of(TEMPLATES["hermes"], request(REQUIRED))
    assert use.constraint(Constraint("regex", "a")) == use.constraint() == use.calls


def test_a_bare_call_is_read_though_nothing_constrains_it():
    use = use_of(TEMPLATES["llama"], request(AUTO))
    assert use.constraint() is None
    good = '{"name": "weather", "parameters": {"city": "Oslo", "days": 1}}'
    for text, num_calls in ((good, 1), ("So: " + good, 0), ('{"name": "weather"}', 0), ("{a}", 0)):
        output = use.output()
        pieces = output.push(text) + output.finish()
        assert (output.num_calls, prose_of(pieces)) == (num_calls, "" if num_calls else text)


def test_a_conversation_without_tools_stays_as_it_is():
    use = use_of(TEMPLATES["hermes"], request(tools=()))
    assert (use.messages, use.tools, use.constraint()) == ((USER,), (), None)


@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"prompt": "text"}, NotSupported, None),
        ({"prompt": TokenIds((1, 2))}, NotSupported, None),
        ({"tools": (NOW, NOW)}, BadArgument, "tools"),
        ({"tools": (), "choice": REQUIRED}, BadArgument, "choice"),
        ({"choice": ToolChoice("required", name="x")}, BadArgument, "choice"),
    ],
)
def test_invalid_requests_are_rejected(wrong, error, param):
    with pytest.raises(error) as caught:
        use_of(TEMPLATES["hermes"], request(**wrong))
    assert caught.value.param == param


def test_a_result_is_given_the_name_of_what_was_called():
    """Some templates refuse a result without one, and clients leave it out."""
    call = CalledTool("call_1", "weather", "{}")
    called = Message("assistant", "", tool_calls=(call,))
    results = [Message("tool", "rain", tool_call_id=one) for one in ("call_1", "other")]
    use = use_of(TEMPLATES["hermes"], request(prompt=(USER, called, *results)))
    assert [message.name for message in use.messages] == [None, None, "weather", None]


def test_a_model_without_a_template_has_no_tools():
    with pytest.raises(NotSupported):
        use_of(ChatTemplate(None), request())
