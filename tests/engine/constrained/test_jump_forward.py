"""Jump-forward on one text, against the reference model, with tokenizers that merge forced text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.plain_constrained import PlainConstrained
from support.engine.random_dfas import dfa_of
from support.examples import examples
from support.small_tokenizers import byte_level, byte_level_of, sentencepiece

from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.constrained.jump_forward import ConstrainedText
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import Dfa, build_dfa
from agentflow.engine.grammar.llguidance import ALL_TOKENS_ALLOWED
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.grammar.token_dfa import DfaGrammar
from agentflow.engine.text.tokenizer import Tokenizer

WORDS = [
    "na",
    "name",
    '":',
    '",',
    '", "',
    '{"',
    ' "',
    "ab",
    "abc",
    "bc",
    "bcd",
    "cd",
    "éa",
    "12",
    "true",
    "tr",
]
TOKENIZERS = {
    "merging": Tokenizer(byte_level_of(WORDS)),
    "trained": Tokenizer(byte_level(special=("<|im_start|>", "<|im_end|>"))),
    "sentencepiece": Tokenizer(sentencepiece()),
}
GRAMMARS = {name: GrammarCache(tokenizer, tokenizer.vocab_size) for name, tokenizer in TOKENIZERS.items()}
PATTERNS = [
    r'\{"name": "[a-d]{1,5}", "x": (12|true|tr)\}',
    r"(abc|abd|bcd)*(abcd)+",
    r"[éè]a(bc)*d?",
    r'(\{"(a|b)": "abcd", )+"[^"]*"',
    r"The quick brown (fox|dog)( jumps)?",
    r"日本語の(テキスト|日)",
]
LOOKING_AROUND = [
    r"(?:abc|ab)\b( ?\bquick\b)?(?:\B|-)",
    r"(?m)(?:^The$\n?){1,2}",
    r"(?<![b-])a+\b(?!b)[é ].?",
]
"""The text after a boundary, or the end of the text there, is forced by the text before."""


def constrained(name: str, dfa: Dfa, *, jumps: bool = True) -> ConstrainedText:
    tokenizer = TOKENIZERS[name]
    vocabulary = GRAMMARS[name].vocabulary
    encode = (lambda text: tokenizer.encode(text, continues=True)) if jumps else None
    return ConstrainedText(DfaGrammar(dfa, vocabulary).matcher(), vocabulary, encode)


def allowed_of(text: ConstrainedText, vocab_size: int) -> set[int]:
    bits = np.unpackbits(text.mask().view(np.uint8), count=vocab_size, bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def check_forced(text: ConstrainedText, plain: PlainConstrained) -> None:
    """No sampled token wrote the forced parts, and the grammar had no alternative to them."""
    num_chars = len(plain.data.decode(errors="ignore"))
    for most in (num_chars, num_chars // 2):
        spans = text.forced_spans(most)
        chars = [char for first, length in spans for char in range(first, first + length)]
        assert chars == sorted(char for char in plain.forced_chars() if char < most)
        assert len(spans) == sum(char - 1 not in chars for char in chars)  # neighbours are joined
    assert text.num_forced_tokens(len(text.token_ids)) == plain.num_forced_tokens()
    for at, is_sampled in enumerate(plain.sampled):
        if not is_sampled:
            assert plain.next_bytes(plain.data[:at]) == [plain.data[at]]
            assert not plain.dfa.accepting[plain.state(plain.data[:at])]


def check_walk(name: str, dfa: Dfa, jumps: bool, max_tokens: int, choices: st.DataObject) -> bytes:
    """Both walk the same way, step by step, until the text must end or has enough tokens."""
    tokenizer = TOKENIZERS[name]
    text, plain = constrained(name, dfa, jumps=jumps), PlainConstrained(dfa, tokenizer, jumps)
    while True:
        before = list(text.token_ids)
        jump = text.jump(max_tokens)
        assert plain.jump(max_tokens) == (jump is not None)
        assert text.token_ids == plain.ids
        if jump is not None:
            assert before[: jump.num_kept] + jump.token_ids == plain.ids
            assert plain.ids[: jump.num_kept + 1] != before[: jump.num_kept + 1]
        # Text that was delivered is replaced only by the same text.
        assert (plain.data + plain.held).startswith(plain.shown)
        assert text.may_end() == plain.may_end()
        assert text.must_end() == plain.must_end()
        check_forced(text, plain)
        allowed = plain.allowed()
        assert allowed_of(text, tokenizer.vocab_size) == allowed
        if (
            plain.must_end()
            or len(plain.ids) >= max_tokens
            or (plain.may_end() and choices.draw(st.booleans()))
        ):
            return plain.data
        assert allowed  # nothing leads into a dead end
        token = choices.draw(st.sampled_from(sorted(allowed)))
        text.accept(token)
        plain.accept(token)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    st.sets(st.text('abcdé":, {name', min_size=1, max_size=12), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 12),
    st.data(),
)
def test_a_choice_of_texts_goes_as_in_the_reference(
    name: str, texts: Sequence[str], jumps: bool, max_tokens: int, data: st.DataObject
) -> None:
    check_walk(name, dfa_of([text.encode() for text in texts]), jumps, max_tokens, data)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.sampled_from([*PATTERNS, *LOOKING_AROUND]), st.booleans(), st.integers(1, 60), st.data())
def test_a_pattern_goes_as_in_the_reference(
    name: str, pattern: str, jumps: bool, max_tokens: int, data: st.DataObject
) -> None:
    check_walk(name, build_dfa(parse_regex(pattern)), jumps, max_tokens, data)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.sampled_from(PATTERNS), st.booleans(), st.data())
def test_a_text_under_llguidance_is_that_under_the_dfa(
    name: str, pattern: str, jumps: bool, data: st.DataObject
) -> None:
    """The library may force less text, and allows the same."""
    tokenizer, vocabulary = TOKENIZERS[name], GRAMMARS[name].vocabulary
    source = f"start: /{pattern}/\n{ALL_TOKENS_ALLOWED}"
    grammar = GRAMMARS[name].grammar(CompiledConstraint(pattern, "llguidance", source.encode()))
    encode = (lambda text: tokenizer.encode(text, continues=True)) if jumps else None
    text = ConstrainedText(grammar.matcher(), vocabulary, encode)
    plain = PlainConstrained(build_dfa(parse_regex(pattern)), tokenizer, jumps)
    for _ in range(60):
        text.jump(60)
        plain.ids, plain.held = list(text.token_ids), text.held
        allowed = plain.allowed()
        assert allowed_of(text, tokenizer.vocab_size) == allowed
        assert text.may_end() == plain.may_end()
        assert text.must_end() == plain.must_end()
        if not allowed or (plain.may_end() and data.draw(st.booleans())):
            assert plain.dfa.matches(plain.data)
            return
        text.accept(data.draw(st.sampled_from(sorted(allowed))))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
@examples(20)
def test_of_a_long_text_only_the_end_is_encoded_again(name: str, data: st.DataObject) -> None:
    """The ids still equal an encoding of the whole text."""
    tokenizer, vocabulary = TOKENIZERS[name], GRAMMARS[name].vocabulary
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return tokenizer.encode(text, continues=True)

    record = r'\{"name": "[a-d é]{1,6}", "fox": (true|tr), "text": "日本語の(テキスト|日)"\}'
    dfa = build_dfa(parse_regex(rf"\[({record}, )+\]"))
    text = ConstrainedText(DfaGrammar(dfa, vocabulary).matcher(), vocabulary, encode)
    table = vocabulary.token_bytes
    while len(text.token_ids) < 600:
        if text.jump(1000) is not None:
            written = b"".join([table[i] for i in text.token_ids])
            whole = tokenizer.encode((written + text.held).decode(errors="ignore"), continues=True)
            assert whole[: len(text.token_ids)] == text.token_ids
        allowed = [i for i in allowed_of(text, tokenizer.vocab_size) if b"]" not in table[i]]
        text.accept(data.draw(st.sampled_from(sorted(allowed))))
    assert max(lengths) < len(b"".join([table[i] for i in text.token_ids]).decode(errors="ignore")) / 2


def test_forced_text_gets_the_tokenizers_own_ids() -> None:
    tokenizer = TOKENIZERS["merging"]
    text = constrained("merging", build_dfa(parse_regex(r'\{"name": "ab[xy]')))
    jump = text.jump(100)
    assert jump is not None
    assert jump.num_kept == 0
    # `ab` might become `abc`: but nothing that begins with it may follow, so that it need not wait.
    assert jump.token_ids == tokenizer.encode('{"name": "ab', continues=True)


def test_a_token_that_may_still_grow_is_held_back() -> None:
    tokenizer = TOKENIZERS["merging"]
    text = constrained("merging", build_dfa(parse_regex(r'\{"name": "ab[cx]')))
    jump = text.jump(100)
    assert jump is not None
    assert jump.token_ids == tokenizer.encode('{"name": "', continues=True)
    names = {tokenizer.decode([i], continues=True) for i in allowed_of(text, tokenizer.vocab_size)}
    assert names == {"ab", "abc"}


def test_sampled_tokens_are_re_encoded_with_forced_text() -> None:
    tokenizer = TOKENIZERS["merging"]
    text = constrained("merging", build_dfa(parse_regex(r"[ab]{2}cd!")))
    for char in "ab":
        text.accept(tokenizer.encode(char, continues=True)[0])
    jump = text.jump(100)
    assert jump is not None
    assert jump.num_kept == 0
    assert jump.token_ids == tokenizer.encode("abcd!", continues=True)
    assert text.must_end()


def test_no_more_tokens_than_there_is_room_for() -> None:
    text = constrained("merging", build_dfa(parse_regex(r'\{"name": "ab[cx]')))
    assert text.jump(3) is None
    assert text.token_ids == []


def test_forced_text_without_room_is_encoded_once():
    """Not again after each of its tokens, which would take time by the square of its length."""
    text = constrained("merging", build_dfa(parse_regex("(ab|bc)" + "name" * 50 + "(cd|tr)")))
    encode, lengths = text._encode, []

    def counted(written: str) -> list[int]:
        lengths.append(len(written))
        return encode(written)

    text._encode = counted
    for token_id in encode("ab" + "name" * 50 + "cd"):
        text.accept(token_id)
        assert text.jump(max_tokens=20) is None
    assert lengths == [2 + 4 * 50]
    assert text.must_end()
