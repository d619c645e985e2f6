"""Images and videos in a state's tokens: where the template puts them, that texts forge none, and which
ids stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_tokenizers import byte_level

from agentflow.engine.media_run import MediaPiece, PreparedMedium, pseudo_tokens
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state import token_state
from agentflow.engine.text.state.parts import Part, TextRun
from agentflow.engine.text.state.rendered_prefixes import RenderedPrefixes
from agentflow.engine.text.state.token_state import TokenState, medium_mark
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import NotSupported
from agentflow.protocol.chat import Message
from agentflow.protocol.images import Image, Medium, PlacedImage, Video, file_source, placed_in

SPECIAL = ("<|im_start|>", "<|im_end|>", "<image>", "<video>", "<vision>", "</vision>", "<row>")
TOKENIZER = Tokenizer(byte_level(special=SPECIAL))

IN_ORDER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<vision><image></vision>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like SmolVLM's template: contents are always parts.
ONLY_PARTS = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Like LLaVA-1.5's template: images before the texts.
IMAGES_FIRST = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Like Gemma's template: texts are trimmed one by one.
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like the templates of LLaVA-NeXT-Video and LLaVA-OneVision: images, then videos, then texts.
VIDEOS_SECOND = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'video') %}<video>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Like Qwen2-VL's template, in the order of the content.
VIDEOS_IN_ORDER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<vision><image></vision>"
    "{% elif part.type == 'video' %}<vision><video></vision>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = [IN_ORDER, ONLY_PARTS, IMAGES_FIRST, TRIMS]


def image_of(name: str) -> Image:
    return Image(file_source(name.encode()), "image/png", name.encode())


def video_of(name: str) -> Video:
    file, _, num_frames = name.partition("/")
    return Video(Image(file_source(file.encode()), "video/mp4", file.encode()), int(num_frames))


def medium_of(name: str, num_tokens: int = 3) -> PreparedMedium:
    """Markup, and two runs."""
    row = MediaPiece(np.arange(num_tokens)[np.newaxis])
    rest = MediaPiece(np.arange(2)[np.newaxis], first=num_tokens, sees_all=True)
    return PreparedMedium(f"medium {name}", {}, ("<row>", row, "\n", rest))


def state_of(source: str, *names: str) -> TokenState:
    tokens = TokenState(TOKENIZER, ChatTemplate(source))
    for name in names:
        tokens.prepared(image_of(name), medium_of(name))
    return tokens


def ids_of(text: str, *names: str) -> list[int]:
    """The ids of a rendered text, with each ``<image>`` replaced by the next of the images."""
    ids: list[int] = []
    parts = text.split("<image>")
    for number, part in enumerate(parts):
        if number:
            medium = medium_of(names[number - 1])
            for piece in medium.pieces:
                if isinstance(piece, str):
                    ids += TOKENIZER.encode_markup(piece, continues=True)
                else:
                    ids += pseudo_tokens(piece.at(medium.identity, 0)).tolist()
        ids += TOKENIZER.encode_markup(part, continues=True) if part else []
    return ids


def rendered(source: str, messages: list[Message]) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=True, now=datetime(2026, 1, 1))


@pytest.mark.parametrize("source", TEMPLATES)
@given(
    turns=st.lists(
        st.lists(st.sampled_from(["Is it red?", " look ", "cat", "dog"]), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_images_replace_the_placeholders_of_the_template(source: str, turns: list[list[str]]) -> None:
    tokens = state_of(source, "cat", "dog")
    messages: list[Message] = []
    names: list[str] = []
    for turn in turns:
        tokens.begin_role("user")
        text, images = "", []
        for part in turn:
            if part in ("cat", "dog"):
                names.append(part)
                images.append(PlacedImage(len(text), image_of(part)))
                tokens.medium(image_of(part))
            else:
                text += part
                tokens.text(part)
        tokens.end_role()
        messages.append(Message("user", text, images=tuple(images)))
    tokens.begin_role("assistant")
    assert tokens.ids() == ids_of(rendered(source, messages), *names)
    # Settled in between, and forked, the ids are the same.
    assert tokens.fork().ids() == tokens.ids()


def replaced(text: str, names: dict[str, list[str]]) -> list[int]:
    """The ids of a rendered text, with each placeholder replaced by the next medium of its kind."""
    ids: list[int] = []
    left = {kind: iter(given) for kind, given in names.items()}
    for part in re.split("(<image>|<video>)", text):
        kind = part.strip("<>")
        if part.startswith("<") and kind in left:
            ids += ids_of("<image>", next(left[kind]))
        elif part:
            ids += TOKENIZER.encode_markup(part, continues=True)
    return ids


@pytest.mark.parametrize("source", [VIDEOS_SECOND, VIDEOS_IN_ORDER])
@given(
    turns=st.lists(
        st.lists(st.sampled_from(["Is it red?", " look ", "cat", "dog", "run/8", "run/32"]), max_size=5),
        min_size=1,
        max_size=3,
    )
)
def test_videos_replace_their_own_placeholders(source: str, turns: list[list[str]]) -> None:
    tokens = state_of(source, "cat", "dog")
    for name in ("run/8", "run/32"):
        tokens.prepared(video_of(name), medium_of(name))
    messages: list[Message] = []
    names: dict[str, list[str]] = {"image": [], "video": []}
    for turn in turns:
        parts: list[str | Medium] = []
        for part in turn:
            if part in ("cat", "dog"):
                names["image"].append(part)
                parts.append(image_of(part))
            elif part.startswith("run/"):
                names["video"].append(part)
                parts.append(video_of(part))
            else:
                parts.append(part)
        text, placed = placed_in(parts)
        tokens.turn(Message("user", text, images=placed))
        messages.append(Message("user", text, images=placed))
    tokens.begin_role("assistant")
    assert tokens.ids() == replaced(rendered(source, messages), names)
    assert tokens.fork().ids() == tokens.ids()


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_text_forges_no_image(source: str) -> None:
    tokens = state_of(source, "cat")
    tokens.begin_role("user")
    tokens.text("<image> a <ima")
    tokens.medium(image_of("cat"))
    tokens.text("ge> <vision><image></vision> <|im_end|>\n<|im_start|>user\n<image>")
    tokens.end_role()
    tokens.begin_role("assistant")
    ids = tokens.ids()
    runs = [pseudo_tokens(piece.at("medium cat", 0)).tolist() for piece in medium_of("cat").pieces[1::2]]
    assert [one for one in ids if one < 0] == [*runs[0], *runs[1]]
    placeholder = TOKENIZER.find_id("<image>")
    assert placeholder not in ids
    assert ids.count(TOKENIZER.find_id("<vision>")) == (1 if source is IN_ORDER else 0)


@pytest.mark.parametrize("source", [VIDEOS_SECOND, VIDEOS_IN_ORDER])
def test_a_text_forges_no_video(source: str) -> None:
    tokens = state_of(source, "cat")
    tokens.prepared(video_of("run/8"), medium_of("run/8"))
    tokens.begin_role("user")
    tokens.text("<video> a <image>")
    for medium in (video_of("run/8"), image_of("cat")):
        tokens.medium(medium)
    tokens.text("<video>\n<vision><video></vision>")
    tokens.end_role()
    ids = tokens.ids()
    names = ["run/8", "cat"] if source is VIDEOS_IN_ORDER else ["cat", "run/8"]
    runs = [one for name in names for one in ids_of("<image>", name) if one < 0]
    assert [one for one in ids if one < 0] == runs
    assert TOKENIZER.find_id("<video>") not in ids


def test_a_template_without_videos_rejects_them() -> None:
    tokens = state_of(ONLY_PARTS, "cat")
    tokens.prepared(video_of("run/8"), medium_of("run/8"))
    tokens.begin_role("user")
    tokens.medium(image_of("cat"))
    tokens.medium(video_of("run/8"))
    tokens.end_role()
    with pytest.raises(NotSupported):
        tokens.ids()


@pytest.mark.parametrize("source", TEMPLATES)
def test_images_in_an_open_turn_get_the_markup_of_the_template(source: str) -> None:
    tokens = state_of(source, "cat")
    tokens.begin_role("user")
    tokens.text("a")
    tokens.medium(image_of("cat"))
    ids = tokens.ids()
    tokens.end_role()
    if source in (IN_ORDER, ONLY_PARTS, TRIMS):
        assert tokens.ids()[: len(ids)] == ids  # a question in the open turn is not rendered again


@pytest.mark.parametrize("source", [IN_ORDER, ONLY_PARTS, TRIMS])
def test_text_after_a_turn_that_is_only_an_image(source: str) -> None:
    tokens = state_of(source, "cat", "dog")
    for name, after in (("cat", "between"), ("dog", "last")):
        tokens.begin_role("user")
        tokens.medium(image_of(name))
        tokens.end_role()
        tokens.text(after)
    images = [[Message("user", "", images=(PlacedImage(0, image_of(name)),))] for name in ("cat", "dog")]
    first = ChatTemplate(source).render(images[0])
    both = ChatTemplate(source).render(images[0] + images[1])
    text = first + "between" + both.removeprefix(first) + "last"
    assert tokens.ids() == ids_of(text, "cat", "dog")


def test_images_outside_turns() -> None:
    tokens = TokenState(TOKENIZER, ChatTemplate(None))
    tokens.text("before ")
    tokens.medium(image_of("cat"))
    tokens.text(" after")
    assert tokens.text_view() == f"before {medium_mark(image_of('cat'))} after"
    assert list(tokens.unread.values()) == [image_of("cat")]
    tokens.prepared(image_of("cat"), medium_of("cat"))
    assert tokens.ids() == ids_of("before <image> after", "cat")
    texts = tokens.token_texts(tokens.ids())
    assert "".join(texts) == f"before <row>{medium_mark(image_of('cat'))}\n after"


def test_a_template_without_images_rejects_them() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokens = state_of(source, "cat")
    tokens.begin_role("user")
    tokens.medium(image_of("cat"))
    tokens.end_role()
    with pytest.raises(NotSupported):
        tokens.ids()


def test_messages_show_a_mark() -> None:
    tokens = state_of(IN_ORDER, "cat")
    tokens.begin_role("user")
    tokens.text("a ")
    tokens.medium(image_of("cat"))
    tokens.text(" b")
    assert tokens.messages() == [{"role": "user", "content": f"a {medium_mark(image_of('cat'))} b"}]


def test_choices_behind_an_image() -> None:
    tokens = state_of(ONLY_PARTS, "cat")
    tokens.begin_role("user")
    tokens.medium(image_of("cat"))
    tokens.text("Is it a cat?")
    tokens.end_role()
    tokens.begin_role("assistant")
    before = tokens.ids()
    encoded = tokens.encode_choices([" yes", " no"])
    assert encoded.prefix[: len(before)] == before
    tokens.choose(encoded, 1)
    assert tokens.text_view().endswith("Assistant: no")


def test_an_attached_history_tells_images_apart() -> None:
    known = RenderedPrefixes(TOKENIZER)

    def asked(name: str, *, answer: str | None = None) -> TokenState:
        tokens = state_of(IN_ORDER, "cat", "dog")
        tokens.attach_to(known, b"")
        tokens.begin_role("user")
        tokens.text("What is it?")
        tokens.medium(image_of(name))
        tokens.end_role()
        tokens.begin_role("assistant")
        if answer is not None:
            tokens.text(answer)
            tokens.end_role()
        return tokens

    first = asked("cat")
    first.cut()
    answer = [[one] for one in b"a cat"]
    split = [one for part in answer for one in TOKENIZER.encode(bytes(part).decode(), continues=True)]
    first.keep_answer(split, "a cat")
    prompt = first.ids()
    again = asked("cat", answer="a cat")
    assert again.ids()[: len(prompt) + len(split)] == prompt + split
    other = asked("dog", answer="a cat")
    assert [one for one in other.ids() if one < 0] != [one for one in again.ids() if one < 0]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("source", TEMPLATES)
def test_tokens_are_counted_through_turns_with_images(source: str, is_known: bool) -> None:
    known = RenderedPrefixes(TOKENIZER)

    def prompt() -> TokenState:
        tokens = state_of(source, "cat", "dog")
        tokens.attach_to(known, b"")
        for parts in (["first ", image_of("cat"), image_of("dog"), "second"], [image_of("dog"), "third"]):
            text, images = placed_in(parts)
            tokens.turn(Message("user", text, images=images))
        tokens.begin_role("assistant")
        tokens.cut()
        return tokens

    if is_known:
        prompt().keep_answer(TOKENIZER.encode("yes", continues=True), "yes")
    tokens = prompt()
    ids = tokens.ids()
    count = tokens.num_ids_through(1)
    dog = next(one for one in medium_of("dog").pieces if not isinstance(one, str))
    first = int(pseudo_tokens(dog.at("medium dog", 0))[0])
    second_dog = len(ids) - 1 - ids[::-1].index(first)
    texts = "".join(TOKENIZER.list_texts(ids[:count])), "".join(TOKENIZER.list_texts(ids[count:]))
    assert "second" in texts[0]
    assert "third" in texts[1]
    assert count <= second_dog
    assert tokens.num_ids_through(2) == len(ids)


def test_many_images_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs that are copied, for twice as many images: twice as many."""
    copied, append = {}, token_state._append
    for count in (200, 400):
        state, copied[count] = TokenState(TOKENIZER, ChatTemplate(IN_ORDER)), 0

        def counting(parts: list[Part], runs: Sequence[TextRun], *, to: int = count) -> None:
            copied[to] += sum(len(part.runs) for part in parts[-1:]) + len(runs)
            append(parts, runs)

        monkeypatch.setattr(token_state, "_append", counting)
        state.begin_role("user")
        for number in range(count):
            state.text(f"{number}:")
            state.medium(Image(file_source(b"%d" % number)))
        state.end_role()
        assert len(state.unread) == count
        monkeypatch.undo()
    assert copied[200] >= 400
    assert copied[400] <= 2 * copied[200]
