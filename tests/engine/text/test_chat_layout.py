"""Renderings taken apart into markup and contents, against the same templates written in Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import chat_template_shapes as shapes
from support.engine.conversations import (
    TEMPLATES,
    alternating,
    hostile_contents,
    messages_of,
    pieces_of,
    reasoning,
)

from agentflow.engine.text.chat_layout import MIN_RENDERINGS, Layout, lay_out
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message


@pytest.mark.parametrize("name", shapes.WITH_TWIN)
@given(data=st.data(), opens=st.booleans())
def test_pieces_are_those_of_the_reference(name: str, data: st.DataObject, opens: bool) -> None:
    source, reference = shapes.WITH_TWIN[name]
    answers = reasoning | st.sampled_from(["a", " b ", "a\n"]) if name == "thinking" else hostile_contents
    turns = data.draw(alternating(answers))
    layout = lay_out(TEMPLATES[name], messages_of(turns), "assistant" if opens else None)
    assert pieces_of(layout) == shapes.joined(reference(turns, opens))
    assert source == shapes.ALL[name]


@pytest.mark.parametrize("name", shapes.WITH_TWIN)
@given(data=st.data())
def test_a_conversation_that_grows(name: str, data: st.DataObject) -> None:
    """Building a layout from the previous one gives the same as building it from nothing."""
    reference = shapes.WITH_TWIN[name][1]
    answers = reasoning if name == "thinking" else hostile_contents
    turns = data.draw(alternating(answers))
    previous: Layout | None = None
    for n in range(len(turns) + 1):
        if n:
            previous = lay_out(TEMPLATES[name], messages_of(turns[:n]), previous=previous)
            assert pieces_of(previous) == shapes.joined(reference(turns[:n], False))
        opens = turns[n][0] if n < len(turns) else "assistant"
        if n or opens == "user":
            opened = lay_out(TEMPLATES[name], messages_of(turns[:n]), opens, previous=previous)
            fresh = lay_out(TEMPLATES[name], messages_of(turns[:n]), opens)
            assert opened == fresh
            previous = opened


def test_an_opened_turn_ends_where_its_content_begins() -> None:
    layout = lay_out(TEMPLATES["chatml"], messages_of([("user", "hello")]), "user")
    assert layout.text.endswith("hello<|im_end|>\n<|im_start|>user\n")
    layout = lay_out(TEMPLATES["headers_and_trim"], [], "system")
    assert layout.text == "<s><|start_header_id|>system<|end_header_id|>\n\n"


def test_the_system_text_inside_the_first_user_turn() -> None:
    layout = lay_out(TEMPLATES["inst"], messages_of([("system", "Be brief."), ("user", "Hi")]), "assistant")
    assert pieces_of(layout) == [
        ("<s>[INST] ", None),
        ("Be brief.", 0),
        ("\n\n", None),
        ("Hi", 1),
        (" [/INST]", None),
    ]


def test_contents_in_another_order_than_the_turns() -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "He")]
    pieces = pieces_of(lay_out(TEMPLATES["system_last"], messages_of(turns)))
    assert [(text, turn) for text, turn in pieces if turn is not None] == [
        ("Hi", 1),
        ("Ho", 2),
        ("Be brief.", 0),
        ("He", 3),
    ]


def test_content_as_json() -> None:
    turns = [("user", "Hi"), ("assistant", "wait"), ("tool", 'a "b"\n<|im_end|>')]
    pieces = pieces_of(lay_out(TEMPLATES["known_roles"], messages_of(turns)))
    assert ('a \\"b\\"\\n<|im_end|>', 2) in pieces
    assert pieces[-1] == ('"}<|im_end|>\n', None)


def test_a_content_that_is_shown_twice_and_altered() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.content | upper }}|{{ m.content | upper }}]{% endfor %}"
    )
    layout = lay_out(template, messages_of([("user", "a|"), ("user", "b")]))
    assert pieces_of(layout) == [
        ("[", None),
        ("A|", 0),
        ("|", None),
        ("A|", 0),
        ("][", None),
        ("B", 1),
        ("|", None),
        ("B", 1),
        ("]", None),
    ]


def test_content_indistinguishable_from_markup_is_rejected() -> None:
    turns = messages_of([("user", ">dne<"), ("user", "b")])
    template = ChatTemplate("{% for m in messages %}[{{ m.content | reverse }}]{% endfor %}")
    with pytest.raises(NotSupported):
        lay_out(template, turns)
    assert lay_out(template, messages_of([("user", " ")])).text == "[ ]"


def test_contents_that_the_template_runs_together_are_refused() -> None:
    template = ChatTemplate("{{ messages | map(attribute='content') | join('') | replace('ab', 'abab') }}")
    with pytest.raises(NotSupported):
        lay_out(template, messages_of([("user", "a"), ("user", "b")]))


def test_a_content_that_is_shown_again_later() -> None:
    source = "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}"
    again = "{% if messages | length > 1 %}{{ messages[0].content | upper }}{% endif %}"
    template = ChatTemplate(source + again)
    turns = messages_of([("user", "a"), ("user", "b")])
    previous = lay_out(template, turns[:1])
    layout = lay_out(template, turns, previous=previous)
    assert pieces_of(layout) == [("[", None), ("A", 0), ("][", None), ("B", 1), ("]", None), ("A", 0)]


def test_the_time_does_not_pass_between_renderings() -> None:
    template = ChatTemplate("{% for m in messages %}{{ strftime_now('%S.%f') + m.content }}{% endfor %}")
    turns = messages_of([("user", "a"), ("user", "b")])
    assert [turn for _, turn in pieces_of(lay_out(template, turns))] == [None, 0, None, 1]


def test_ambiguous_text_is_content() -> None:
    """Between the first and the last thing that the template makes of a content all counts as content."""
    source = "{% for m in messages %}[{{ m.content | reverse }}|{{ m.content }}|{{ m.content | reverse }}]"
    layout = lay_out(ChatTemplate(source + "{% endfor %}"), messages_of([("user", ">dne<"), ("user", "b")]))
    assert pieces_of(layout) == [
        ("[", None),
        ("<end>|>dne<|<end>", 0),
        ("][", None),
        ("b|b|b", 1),
        ("]", None),
    ]


def test_other_markup_for_an_empty_content() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ '<' + m.content + '>' if m.content else '<none>' }}{% endfor %}"
    )
    for texts, expected in (
        (["", ""], [("<none><none>", None)]),
        (["a", ""], [("<", None), ("a", 0), ("><none>", None)]),
    ):
        assert pieces_of(lay_out(template, messages_of([("user", text) for text in texts]))) == expected


def test_a_template_that_requires_a_certain_content() -> None:
    source = "{% for m in messages %}{% if m.content != 'ok' %}{{ raise_exception('not ok') }}{% endif %}"
    template = ChatTemplate(source + "{{ m.content }}{% endfor %}")
    with pytest.raises(NotSupported) as caught:
        lay_out(template, messages_of([("user", "ok")]))
    assert caught.value.__cause__ is None  # its content is found at no place
    with pytest.raises(NotSupported, match="not ok"):  # the template's own words
        lay_out(template, messages_of([("user", "other")]))


def test_a_generated_text_is_found_as_it_was_generated() -> None:
    """The template writes the space before an answer itself, and the model wrote it too."""
    turns = [Message("user", "Hi"), Message("assistant", " Ho ho", generated=True)]
    pieces = pieces_of(lay_out(TEMPLATES["inst"], turns))
    assert pieces == [("<s>[INST] ", None), ("Hi", 0), (" [/INST]", None), (" Ho ho", 1), ("</s>", None)]


def test_a_turn_that_the_template_does_not_show_cannot_be_opened() -> None:
    with pytest.raises(NotSupported):
        lay_out(TEMPLATES["system_last"], [], "system")


class Counting(ChatTemplate):
    """Counts how often it is rendered."""

    num_renderings = 0

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.num_renderings += 1
        return super().render(*args, **kwargs)


ANSWER_BEGINS = "<|im_end|>\n<|im_start|>assistant\n"


def test_text_for_blank_contents_is_markup_for_any_number_of_them() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}")
    layout = lay_out(template, messages_of([("user", text) for text in ("\n", 'a"', " \n", 'b"')]))
    assert [text for text, turn in pieces_of(layout) if turn is not None] == ['a\\"', 'b\\"']


@pytest.mark.parametrize("num_turns", [2, 20, 300])
def test_many_altered_turns_are_found_together(num_turns: int) -> None:
    template = Counting(shapes.THINKING)
    turns = [("user", "go on"), ("assistant", "<think>\nwhy\n</think>\n\nso")] * num_turns + [
        ("user", "go on")
    ]
    layout = lay_out(template, messages_of(turns), "assistant")
    assert pieces_of(layout) == shapes.joined(shapes.thinking(turns, True))
    assert template.num_renderings <= 4


def test_many_contents_as_json_are_found_together() -> None:
    template = Counting(shapes.KNOWN_ROLES)
    turns = [("user", "Hi"), *[("assistant", "wait"), ("tool", 'a "b"\n<|im_end|>')] * 100]
    pieces = pieces_of(lay_out(template, messages_of(turns)))
    assert sum(text == 'a \\"b\\"\\n<|im_end|>' for text, turn in pieces if turn is not None) == 100
    assert template.num_renderings <= 4


@given(
    st.lists(
        st.sampled_from(["a", "b" + ANSWER_BEGINS, ANSWER_BEGINS, "</think>" + ANSWER_BEGINS]), max_size=7
    )
)
def test_contents_with_markup_are_content_next_to_altered_turns(texts: list[str]) -> None:
    """Markers of altered contents are not confused with text of other contents."""
    turns = [("user", "a" + ANSWER_BEGINS)]
    for number, text in enumerate(texts):
        turns.append(("user", text) if number % 2 else ("assistant", f"<think>\nx\n</think>\n\n{text}"))
    turns.append(("user", ANSWER_BEGINS))
    layout = lay_out(TEMPLATES["thinking"], messages_of(turns), "assistant")
    assert pieces_of(layout) == shapes.joined(shapes.thinking(turns, True))


def test_rendering_is_limited() -> None:
    """Each turn that the template rewrites takes a rendering."""
    template = Counting("{% for m in messages %}[{{ m.content | upper }}]{% endfor %}")
    few = messages_of([("user", "some words")] * 20)
    assert len(lay_out(template, few).shown) == 20
    template.num_renderings = 0
    many = messages_of([("user", "some words " * 1_000)] * 300)
    with pytest.raises(NotSupported):
        lay_out(template, many)
    assert template.num_renderings <= 2 + MIN_RENDERINGS
