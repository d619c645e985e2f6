"""Chat templates: rendered as transformers renders them, found in a folder, and kept in their sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support import chat_template_shapes as shapes
from support import small_tokenizers
from support.engine.conversations import TEMPLATES, TOKENS, alternating, messages_of, pieces_of
from support.faults import has_param

from agentflow.engine.text.chat_layout import lay_out
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import BadModelFolder, NotSupported
from agentflow.protocol.chat import Message


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerFast:
    """transformers' own rendering, with a small tokenizer of which only the named tokens matter here."""
    file = tmp_path_factory.mktemp("reference") / "tokenizer.json"
    file.write_text(json.dumps(small_tokenizers.byte_level()))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **TOKENS)


@pytest.mark.parametrize("name", shapes.ALL)
@given(turns=alternating(), opens=st.booleans())
def test_renders_as_transformers_does(
    name: str,
    turns: list[tuple[str, str]],
    opens: bool,
    reference: transformers.PreTrainedTokenizerFast,
) -> None:
    turns = [(role, text) for role, text in turns if role != "system" or name != "known_roles"]
    expected = reference.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns],
        chat_template=shapes.ALL[name],
        tokenize=False,
        add_generation_prompt=opens,
    )
    messages = messages_of(turns)
    assert TEMPLATES[name].render(messages, add_generation_prompt=opens) == expected
    layout = lay_out(TEMPLATES[name], messages, "assistant" if opens else None)
    assert "".join(piece.text for piece in layout.pieces()) == expected


@pytest.mark.model
@given(turns=alternating(), opens=st.booleans())
def test_the_default_models_template(
    model_folder: Path,
    turns: list[tuple[str, str]],
    opens: bool,
    reference: transformers.PreTrainedTokenizerFast,
) -> None:
    template = ChatTemplate.from_folder(model_folder)
    expected = reference.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns],
        chat_template=template.source,
        tokenize=False,
        add_generation_prompt=opens,
    )
    layout = lay_out(template, messages_of(turns), "assistant" if opens else None)
    assert layout.text == expected
    assert pieces_of(layout) == shapes.joined(shapes.chatml(turns, opens))


@pytest.mark.parametrize(
    ("name", "roles", "message"),
    [
        ("inst", ["user", "user"], "must alternate"),  # the templates' own words
        ("inst", ["user", "judge"], "must alternate|only user"),
        ("known_roles", ["judge"], "Unexpected role: judge"),
    ],
)
def test_roles_that_a_template_rejects(name: str, roles: list[str], message: str) -> None:
    with pytest.raises(NotSupported, match=message) as caught:
        lay_out(TEMPLATES[name], messages_of([(role, "x") for role in roles]))
    assert roles[-1] in str(caught.value)


def test_the_time_is_the_one_that_was_given() -> None:
    layout = lay_out(TEMPLATES["known_roles"], messages_of([("user", "x")]), now=datetime(2031, 2, 3))
    assert "Today is 03 February 2031." in layout.text


def test_no_template() -> None:
    template = ChatTemplate(None)
    assert not template.has_template
    with pytest.raises(NotSupported):
        template.render([Message("user", "x")])
    assert template.turn_markup() == ""


def test_a_template_cannot_reach_out() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
    ):
        with pytest.raises(NotSupported):
            ChatTemplate(source + "{{ messages[0].__class__.x }}").render([Message("user", "x")])


def folders() -> Iterator[tuple[dict[str, str], str | None]]:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    yield {}, None
    yield {"chat_template.jinja": "J", "tokenizer_config.json": '{"chat_template": "C"}'}, "J"
    yield (
        {"chat_template.json": '{"chat_template": "P"}', "tokenizer_config.json": '{"chat_template": "C"}'},
        "P",
    )
    yield {"tokenizer_config.json": '{"chat_template": "C"}'}, "C"
    yield {"tokenizer_config.json": json.dumps({"chat_template": named})}, "D"


@pytest.mark.parametrize(("files", "expected"), list(folders()))
def test_where_a_folder_keeps_its_template(
    files: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    template = ChatTemplate.from_folder(tmp_path)
    assert (template.render([]) if template.has_template else None) == expected


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"chat_template.jinja": "{% for %}"}, "chat_template"),
        (
            {"chat_template.json": '{"chat_template": [{"name": "rag", "template": "R"}]}'},
            "chat_template.json",
        ),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json"),
    ],
)
def test_bad_folders(files: dict[str, str], param: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BadModelFolder, check=has_param(param)):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BadModelFolder, check=has_param("chat_template.jinja")):
        ChatTemplate.from_folder(tmp_path)
