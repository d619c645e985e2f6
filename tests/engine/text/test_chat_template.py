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
from jinja2.exceptions import SecurityError
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


DECODER = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
LATER = {"content": "<later>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    ("config", "special_tokens_map"),
    [
        ({"image_token": "<image>", "extra_special_tokens": {"boi_token": "<boi>"}}, {}),
        ({"extra_special_tokens": {"boi_token": LATER | {"__type": "AddedToken"}}}, {}),
        ({"image_token": "<image>", "bos_token": "<s>"}, {"image_token": LATER, "bos_token": "<later>"}),
        ({"image_token": "<image>"} | DECODER, {"image_token": "<later>"}),
        (
            {"extra_special_tokens": {"boi_token": "<boi>"}},
            {"extra_special_tokens": {"boi_token": "<later>"}},
        ),
        ({}, {"extra_special_tokens": {"boi_token": "<boi>"}, "bos_token": LATER}),
        ({"add_bos_token": True, "boi_token": None, "image_token": 3, "extra_special_tokens": ["<x>"]}, {}),
    ],
)
def test_f37_a_template_receives_every_named_token(
    config: dict[str, object], special_tokens_map: dict[str, object], tmp_path: Path
) -> None:
    source = (
        "{{ bos_token }},{{ boi_token }},{{ image_token }},{{ add_bos_token }}: {{ messages[0].content }}"
    )
    small_tokenizers.write_folder(tmp_path, small_tokenizers.byte_level(), config=config, template=source)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert ChatTemplate.from_folder(tmp_path).render([Message("user", "x")]) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]",
        "{% set x = 0 %}{% generation %}{% set x = x + 1 %}{{ x }}{% endgeneration %}[{{ x }}]",
        "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}",
        "{% set ns = namespace(_a=1) %}{{ ns._a }}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}{{ ns._a }}",
    ],
)
def test_f37_scopes_and_namespaces_of_a_template(
    source: str, reference: transformers.PreTrainedTokenizerFast
) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False)
    except SecurityError:
        with pytest.raises(NotSupported, match="_a"):
            ChatTemplate(source).render([Message("user", "x")])
    else:
        assert ChatTemplate(source).render([Message("user", "x")]) == expected


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
