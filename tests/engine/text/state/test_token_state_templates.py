"""States under templates that rewrite, trim, reorder or reject turns, and text between turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.engine.conversations import (
    SENTENCEPIECE,
    SMALL,
    SMALL_SPEC,
    TEMPLATES,
    TOKENS,
    Script,
    letters,
    say,
    scripts,
    state_of,
)

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import NotSupported


def test_reasoning_that_the_template_drops_later() -> None:
    state = state_of("thinking")
    say(state, "user", "What?")
    state.begin_role("assistant")
    state.cut()
    opened = state.ids()
    answer = "<think>\nthe fox\n</think>\n\nthe dog"
    ids = letters(answer)
    state.generated(ids, answer)
    state.end_role()
    state.cut()
    assert state.ids() == opened + ids + SMALL.encode_markup("<|im_end|>\n")
    assert state.num_rerendered_tokens == 0

    say(state, "user", "Why?")
    state.cut()
    whole = [*opened, *letters("the dog"), *SMALL.encode_markup("<|im_end|>\n<|im_start|>user\n")]
    assert state.ids() == [*whole, *SMALL.encode("Why?"), *SMALL.encode_markup("<|im_end|>\n")]
    assert state.num_rerendered_tokens == len(ids) + len(SMALL.encode_markup("<|im_end|>\n"))
    assert state.messages()[1]["content"] == answer
    state.begin_role("assistant")
    state.cut()
    assert state.num_rerendered_tokens == len(ids) + len(SMALL.encode_markup("<|im_end|>\n"))


def test_f37_generated_tokens_that_the_template_drops_count_before_they_are_settled() -> None:
    state = state_of("thinking")
    say(state, "user", "What?")
    state.begin_role("assistant")
    state.cut()
    answer = "<think>\nthe fox\n</think>\n\nthe dog"
    state.generated(letters(answer), answer)
    state.end_role()
    say(state, "user", "Why?")
    state.cut()
    assert state.num_rerendered_tokens == len(letters(answer))


def test_a_trimmed_answer_keeps_the_ids_before() -> None:
    state = state_of("headers_and_trim")
    say(state, "user", " Hi ")
    state.begin_role("assistant")
    state.cut()
    opened = state.ids()
    assert SMALL.decode(opened, skip_special=False).startswith(
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    )
    state.generated(letters("the fox\n\n"), "the fox\n\n")
    state.cut()
    state.end_role()
    state.cut()
    assert state.ids() == opened + letters("the fox") + SMALL.encode_markup("<|eot_id|>")
    assert state.num_rerendered_tokens == 2


def test_a_text_that_the_template_trims_in_the_middle_of_a_token() -> None:
    state = state_of("headers_and_trim")
    state.begin_role("user")
    state.text(" the")
    state.cut()
    ids = SMALL.encode(" dog")
    assert len(ids) < 4
    state.generated(ids, " dog")
    state.end_role()
    assert state.text_view().endswith("\n\nthe dog<|eot_id|>")
    assert state.ids()[-1 - len(ids) : -1] == ids
    state = state_of("headers_and_trim")
    state.begin_role("user")
    state.generated(ids, " dog")
    state.end_role()
    assert SMALL.decode(state.ids()).endswith("\n\ndog")


def test_a_template_that_shows_a_system_turn_only_with_the_next_one() -> None:
    state = state_of("inst")
    state.begin_role("system")
    state.text("Be brief.")
    state.cut()
    with pytest.raises(NotSupported):
        state.ids()
    state.end_role()
    branch = state.fork()
    for one in (state, branch):
        say(one, "user", "Hi")
        assert one.text_view() == "<s>[INST] Be brief.\n\nHi [/INST]"
        assert one.num_rerendered_tokens == 0


def test_a_templates_error_is_raised_when_ids_are_read() -> None:
    state = state_of("known_roles")
    say(state, "judge", "x")
    state.cut()
    for ask in (state.ids, state.text_view):
        with pytest.raises(NotSupported, match="Unexpected role: judge"):
            ask()
    assert state.messages() == [{"role": "judge", "content": "x"}]


@pytest.mark.parametrize("prepend", ["every", "first", "none"])
@given(script=scripts(with_ids=False))
def test_sentencepiece_says_the_same_as_in_one_go(prepend: str, script: Script) -> None:
    tokenizer, library = SENTENCEPIECE[prepend]
    state = TokenState(tokenizer, TEMPLATES["inst"])
    runs = [(role, text.replace("<", "")) for role, text in script.contents()]
    for role, text in [*runs, ("assistant" if runs[-1][0] == "user" else "user", "the")]:
        say(state, role, text)
    in_one_go = library.encode(state.text_view(), add_special_tokens=False).ids
    assert tokenizer.decode(state.ids()) == tokenizer.decode(in_one_go)


@pytest.mark.parametrize("prepend", SENTENCEPIECE)
def test_an_answer_whose_first_space_the_template_writes_too(prepend: str) -> None:
    tokenizer, _ = SENTENCEPIECE[prepend]
    state = TokenState(tokenizer, TEMPLATES["inst"])
    say(state, "user", "What?")
    state.begin_role("assistant")
    state.cut()
    opened = state.ids()
    ids = [i for char in " the fox" for i in tokenizer.encode(char, continues=True)]
    state.generated(ids, " the fox")
    state.end_role()
    say(state, "user", "Why?")
    state.cut()
    assert state.ids()[: len(opened) + len(ids)] == opened + ids
    assert state.text_view() == "<s>[INST] What? [/INST] the fox</s>[INST] Why? [/INST]"
    assert state.num_rerendered_tokens == 0


def test_text_between_turns_stays_in_its_place() -> None:
    state = state_of("chatml")
    state.text("Before. ")
    say(state, "system", "x")
    state.text("<|im_end|>Between.")
    state.cut()
    state.generated(letters(" More."), " More.")
    say(state, "user", "y")
    state.text("After.")
    assert state.text_view() == (
        "Before. <|im_start|>system\nx<|im_end|>\n<|im_end|>Between. More."
        "<|im_start|>user\ny<|im_end|>\nAfter."
    )
    assert state.messages() == [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    assert sum(i in SMALL.special_ids for i in state.ids()) == 4
    between = SMALL.encode("<|im_end|>Between.") + letters(" More.")
    assert between in [state.ids()[n : n + len(between)] for n in range(len(state.ids()))]
    state.cut()
    assert state.num_rerendered_tokens == 0


def test_text_between_turns_that_are_rewritten() -> None:
    state = state_of("thinking")
    say(state, "user", "x")
    state.begin_role("assistant")
    state.generated(letters("<think>\nhm\n</think>\n\ny"), "<think>\nhm\n</think>\n\ny")
    state.end_role()
    state.text("Between.")
    assert state.text_view().endswith("</think>\n\ny<|im_end|>\nBetween.")
    say(state, "user", "z")
    assert state.text_view().endswith("assistant\ny<|im_end|>\nBetween.<|im_start|>user\nz<|im_end|>\n")


def test_text_between_turns_that_the_template_reorders() -> None:
    state = state_of("system_last")
    say(state, "system", "x")
    state.text("Between.")
    say(state, "user", "y")
    with pytest.raises(NotSupported, match=r"system.*\b1\b"):
        state.ids()


def test_text_between_turns_before_which_an_earlier_turn_moves_away() -> None:
    state = state_of("system_last")
    say(state, "system", "x")
    say(state, "user", "y")
    state.text("Between.")
    assert state.text_view() == "<s>[INST]x\n\ny[/INST]Between."
    say(state, "assistant", "z")
    say(state, "user", "y")
    with pytest.raises(NotSupported, match=r"user.*\b2\b"):
        state.ids()


def test_a_content_whose_first_space_depends_on_rewritten_markup() -> None:
    source = (
        "{{ bos_token if messages | length == 1 else '-' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer, _ = SENTENCEPIECE["every"]
    states = [TokenState(tokenizer, ChatTemplate(source, TOKENS)) for _ in range(2)]
    say(states[0], "user", "the fox")
    states[0].cut()
    assert tokenizer.decode(states[0].ids()) == "the fox"
    say(states[1], "user", "the fox")
    for state in states:
        say(state, "user", "dog")
    assert states[0].ids() == states[1].ids()
    assert tokenizer.decode(states[0].ids()) == "-the foxdog"


class CountingTokenizer(Tokenizer):
    """The real tokenizer, which also records the contents that it encoded."""

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        self.__dict__.setdefault("encoded", []).append(text)
        return super().encode(text, continues=continues)


def test_contents_are_encoded_once_though_turns_are_rewritten() -> None:
    tokenizer = CountingTokenizer(SMALL_SPEC, named_tokens=TOKENS)
    state = TokenState(tokenizer, TEMPLATES["thinking"])
    say(state, "user", "a")
    state.begin_role("assistant")
    state.text("<think>\nb\n</think>\n\n")
    state.cut()
    state.text("c")
    state.end_role()
    say(state, "assistant", "d")
    state.cut()
    say(state, "user", "e")
    state.cut()
    assert state.num_rerendered_tokens > 0
    assert "assistant\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n" in state.text_view()
    assert tokenizer.encoded == ["a", "<think>\nb\n</think>\n\n", "c", "d", "e"]


def test_plain_text_before_turns_has_the_only_bos() -> None:
    tokenizer, _ = SENTENCEPIECE["every"]
    state = TokenState(tokenizer, TEMPLATES["inst"])
    state.text("Before.")
    say(state, "user", "x")
    assert state.ids().count(1) == 1
    assert state.ids()[0] == 1
    assert state.text_view() == "Before.[INST] x [/INST]"


def test_the_time_stays_that_of_the_state() -> None:
    clock = "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    state = TokenState(SMALL, ChatTemplate(clock))
    say(state, "user", "x")
    state.cut()
    before = state.text_view()
    branch = state.fork()
    for one in (state, branch):
        say(one, "assistant", "y")
        assert one.text_view() == before + "|y"
        one.cut()
        assert one.num_rerendered_tokens == 0
