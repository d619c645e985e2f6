"""Grammars kept by llguidance, through the seam: masks against trying each token, and all a text does."""

import random

import numpy as np
import pytest
from support.faults import has_param
from support.small_tokenizers import byte_level, byte_level_of, sentencepiece

from agentflow.engine.grammar import llguidance as llguidance_grammar
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.lark import write_pattern
from agentflow.engine.grammar.dfa import DEAD, START, build_dfa
from agentflow.engine.grammar.grammar import is_allowed
from agentflow.engine.grammar.llguidance import (
    ALL_TOKENS_ALLOWED,
    LlguidanceGrammar,
    LlguidanceVocabulary,
)
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import RequestRefused
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import BYTE_VOCABULARY, SingleBytes

WORDS = ["abc", "abcd", '{"a": ', '"}', "], ", "1234", "é", "日本", "</t", "</tag>", "\n\n", "true"]
TOKENIZERS = {
    "bytes": lambda: Tokenizer(byte_level()),
    "few words": lambda: Tokenizer(byte_level_of(WORDS)),
    "added words": lambda: Tokenizer(byte_level(plain_added=["<tag>", "abc", "日本"])),
    "sentencepiece": lambda: Tokenizer(sentencepiece(extra=["<|x|>"])),
}
MEMBERS = '{"a": {"type": "array", "items": {"$ref": "#"}}, "b": {"type": "string"}}'
RECURSIVE = f'{{"type": "object", "properties": {MEMBERS}}}'
TAGS = '[{"begin": "<tag>", "kind": "regex", "source": "[a-z]{2}", "end": "</tag>"}]'
CONSTRAINTS = {
    "a recursive schema": Constraint("schema", RECURSIVE),
    "the same, with whitespace": Constraint("schema", RECURSIVE, whitespace="free"),
    "any value": Constraint("schema", "{}", whitespace="tight"),
    "brackets": Constraint("grammar", 'start: "(" start ")" | "abc" start? | "日本"'),
    "tags": Constraint("tags", TAGS),
    "letters by property": Constraint("regex", r"\p{Lu}\p{Ll}*( \p{L}+)*"),
}
PATTERNS = [
    "abcd?",
    "(ab|abc|a)+",
    "[^a]*",
    ".*",
    r"\w+( \w+)*",
    "日本|日.*",
    "(true|false|[0-9]{1,4})",
    r'"([^"\\]|\\.)*"',
]


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return LlguidanceVocabulary(tokenizer, tokenizer.vocab_size + 37)  # as models pad theirs


def payload_of(constraint: Constraint) -> str:
    compiled = compile_constraint(constraint.check())
    assert compiled.form == "llguidance"
    return compiled.payload.decode()


def pattern_payload(pattern: str) -> str:
    """The payload of a pattern that would otherwise be a DFA."""
    return f"start: /{write_pattern(parse_regex(pattern))}/\n{ALL_TOKENS_ALLOWED}"


def ids_of(words) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def tried_one_by_one(payload: str, written: bytes, tokenizer, vocab_size: int) -> list[int]:
    """The mask after ``written``, by taking each token's bytes in turn: no trie, no vocabulary but bytes."""
    text = LlguidanceGrammar(payload, BYTE_VOCABULARY).matcher()
    for byte in written:
        text.accept(byte)
    return [
        i for i in range(vocab_size) if tokenizer.token_bytes(i) and _can_take(text, tokenizer.token_bytes(i))
    ]


def _can_take(text, data: bytes) -> bool:
    taken = 0
    try:
        for byte in data:
            text.accept(byte)
            taken += 1
    except ValueError:
        return False
    finally:
        text.roll_back(taken)
    return True


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_are_those_of_trying_each_token(name, tokenizer, vocabulary):
    payload = payload_of(CONSTRAINTS[name])
    matcher = LlguidanceGrammar(payload, vocabulary).matcher()
    dice, written = random.Random(name), b""
    for _ in range(6):
        allowed = ids_of(matcher.mask())
        assert allowed == tried_one_by_one(payload, written, tokenizer, tokenizer.vocab_size)
        if not allowed:
            break
        token_id = dice.choice(sorted(allowed, key=lambda i: -len(tokenizer.token_bytes(i)))[:40])
        matcher.accept(token_id)
        written += tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_and_ends_are_those_of_the_dfa(pattern, tokenizer, vocabulary):
    dfa = build_dfa(parse_regex(pattern))
    matcher = LlguidanceGrammar(pattern_payload(pattern), vocabulary).matcher()
    dice, state = random.Random(pattern), START
    for _ in range(12):
        after = {i: dfa.read(state, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)}
        expected = [i for i in after if tokenizer.token_bytes(i) and after[i] != DEAD]
        assert ids_of(matcher.mask()) == expected
        assert matcher.may_end() == dfa.accepting[state]
        assert matcher.must_end() == (not expected)
        assert matcher.forced() == forced_by(dfa, state)
        if not expected:
            break
        token_id = dice.choice(expected)
        matcher.accept(token_id)
        state = after[token_id]


def forced_by(dfa, state: int) -> bytes:
    forced = bytearray()
    while not dfa.accepting[state]:
        followers = np.flatnonzero(dfa.transitions[state][dfa.class_of_byte] != DEAD)
        if len(followers) != 1:
            break
        forced.append(int(followers[0]))
        state = dfa.read(state, bytes(forced[-1:]))
    return bytes(forced)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_taking_back_restores_the_state(name, vocabulary):
    matcher = LlguidanceGrammar(payload_of(CONSTRAINTS[name]), vocabulary).matcher()
    dice, seen, taken = random.Random(name), [], []
    for _ in range(60):
        seen = seen[: len(taken)]
        here = (ids_of(matcher.mask()), matcher.may_end(), matcher.must_end(), matcher.forced())
        seen.append(here)
        if here[0] and dice.random() < 0.7:
            taken.append(dice.choice(here[0]))
            matcher.accept(taken[-1])
            continue
        back = dice.randint(0, len(taken))
        matcher.roll_back(back)
        taken = taken[: len(taken) - back]
        assert (ids_of(matcher.mask()), matcher.may_end(), matcher.must_end(), matcher.forced()) == seen[
            len(taken)
        ]


def test_forced_text_goes_on_to_the_first_choice(vocabulary):
    members = '{"kind": {"const": "it"}, "of": {"$ref": "#"}}'
    schema = f'{{"type": "object", "properties": {members}, "required": ["kind"]}}'
    matcher = LlguidanceGrammar(payload_of(Constraint("schema", schema)), vocabulary).matcher()
    assert matcher.forced() == b'{"kind": "it"'
    for byte in b'{"kind": "it"':
        matcher.accept(byte_token(vocabulary, byte))
    assert matcher.forced() == b""  # the end of the object, or the next member
    matcher.accept(byte_token(vocabulary, ord(",")))
    assert matcher.forced() == b' "of": {"kind": "it"'


def byte_token(vocabulary, byte: int) -> int:
    tokenizer = vocabulary._tokenizer
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_forced_text_stops_where_the_text_may_end(vocabulary):
    matcher = LlguidanceGrammar(pattern_payload("ab(cd)?"), vocabulary).matcher()
    assert matcher.forced() == b"ab"
    for byte in b"ab":
        matcher.accept(byte_token(vocabulary, byte))
    assert matcher.may_end()
    assert not matcher.must_end()
    assert matcher.forced() == b""
    matcher.accept(byte_token(vocabulary, ord("c")))
    assert matcher.forced() == b"d"
    matcher.accept(byte_token(vocabulary, ord("d")))
    assert matcher.must_end()
    assert matcher.forced() == b""
    assert not matcher.mask().any()


def test_a_token_that_is_not_allowed_changes_nothing(tokenizer, vocabulary):
    matcher = LlguidanceGrammar(payload_of(CONSTRAINTS["brackets"]), vocabulary).matcher()
    before = ids_of(matcher.mask())
    forbidden = [byte_token(vocabulary, ord("b")), -1, vocabulary.vocab_size, 10**6, *tokenizer.special_ids]
    for token_id in forbidden:
        with pytest.raises(ValueError, match=f"does not allow token {token_id} "):
            matcher.accept(token_id)
    assert ids_of(matcher.mask()) == before
    with pytest.raises(ValueError, match="cannot be rolled back"):
        LlguidanceGrammar(payload_of(CONSTRAINTS["brackets"]), vocabulary).matcher().roll_back(1)


def test_a_complete_text_takes_no_token(vocabulary):
    matcher = LlguidanceGrammar(pattern_payload("a"), vocabulary).matcher()
    matcher.accept(byte_token(vocabulary, ord("a")))
    with pytest.raises(ValueError, match="does not allow"):
        matcher.accept(byte_token(vocabulary, ord("a")))
    assert matcher.must_end()
    matcher.roll_back(1)
    assert matcher.forced() == b"a"


def test_masks_have_the_models_size_and_no_special_token(tokenizer, vocabulary):
    words = LlguidanceGrammar(pattern_payload("(.|\n)*"), vocabulary).matcher().mask()
    assert words.dtype == np.uint32
    assert len(words) == -(-vocabulary.vocab_size // 32)
    assert not any(is_allowed(words, i) for i in tokenizer.special_ids)
    assert not any(is_allowed(words, i) for i in range(tokenizer.vocab_size, 32 * len(words)))
    assert all(tokenizer.token_bytes(i) for i in ids_of(words))


def test_texts_under_one_grammar_do_not_know_of_each_other(vocabulary):
    grammar = LlguidanceGrammar(payload_of(CONSTRAINTS["brackets"]), vocabulary)
    one, other = grammar.matcher(), grammar.matcher()
    start = ids_of(one.mask())
    one.accept(byte_token(vocabulary, ord("(")))
    assert ids_of(other.mask()) == start
    assert ids_of(grammar.matcher().mask()) == start


def for_ever(matcher) -> None:
    while matcher.mask().any():
        matcher.accept(ord("a"))


AMBIGUOUS = f'start: e\ne: e "+" e | e e | /[a-z]/ | "(" e ")" |\n{ALL_TOKENS_ALLOWED}'


def test_a_grammar_that_costs_too_much_hurts_its_own_text_only():
    grammar = LlguidanceGrammar(AMBIGUOUS, BYTE_VOCABULARY)
    hostile, harmless = grammar.matcher(), grammar.matcher()
    with pytest.raises(RequestRefused, match="items"):
        for_ever(hostile)
    for ask in (hostile.mask, hostile.may_end, hostile.must_end, hostile.forced):
        with pytest.raises(RequestRefused, check=has_param("constraint")):
            ask()
    assert harmless.mask().any()


LONG = f"start: /(\\w{{1,9}} ){{1,5000}}/\n{ALL_TOKENS_ALLOWED}"


def write_words(matcher, num_bytes: int) -> None:
    for number in range(num_bytes):
        byte = ord(" " if number % 5 == 4 else "a")
        assert is_allowed(matcher.mask(), byte)
        matcher.accept(byte)


def test_one_texts_lexer_states_end_no_other_text(monkeypatch):
    """All texts under a grammar share the lexer's states, whose number is limited."""
    monkeypatch.setattr(llguidance_grammar, "LEXER_STATES", 5000)
    grammar = LlguidanceGrammar(LONG, BYTE_VOCABULARY)
    other = grammar.matcher()
    write_words(other, 10)
    long = grammar.matcher()
    with pytest.raises(RequestRefused, match="states"):
        write_words(long, 100_000)
    write_words(other, 50)
    other.roll_back(7)
    other.accept(ord("b"))
    fresh = grammar.matcher()
    write_words(fresh, 53)
    fresh.accept(ord("b"))
    assert ids_of(other.mask()) == ids_of(fresh.mask())
    assert other.may_end() == fresh.may_end()
    with pytest.raises(ValueError, match="does not allow"):
        other.accept(ord("-"))


def test_f37_the_memory_of_lexers_is_bounded_with_the_grammars():
    """A lexer takes 4 to 10 MB at its limit, of which the estimate had nothing."""
    grammar = LlguidanceGrammar(LONG, BYTE_VOCABULARY)
    other = grammar.matcher()
    write_words(other, 2)
    before = grammar.nbytes
    assert before > 600 * llguidance_grammar.FIRST_LEXER_STATES
    write_words(grammar.matcher(), 500)
    assert grammar.nbytes - before > 10_000_000
    fresh = grammar.matcher()
    write_words(fresh, 2)
    for matcher in (fresh, other):  # the other one's lexer is spent
        write_words(matcher, 498)
    assert ids_of(other.mask()) == ids_of(fresh.mask())


def test_a_text_goes_on_with_a_new_lexer_where_its_own_states_are_few(monkeypatch):
    """Masks look at states around the text, which it does not need any more."""
    monkeypatch.setattr(llguidance_grammar, "LEXER_STATES", 5000)
    matcher = LlguidanceGrammar(LONG, BYTE_VOCABULARY).matcher()
    write_words(matcher, 500)
    assert matcher.may_end()


def test_a_text_that_can_neither_go_on_nor_end_is_refused():
    ascii_only = LlguidanceVocabulary(SingleBytes(), 128)
    matcher = LlguidanceGrammar(pattern_payload("aé"), ascii_only).matcher()
    matcher.accept(ord("a"))
    with pytest.raises(RequestRefused, match="no token can follow"):
        matcher.mask()


def test_a_grammar_that_llguidance_rejects_is_refused(vocabulary):
    with pytest.raises(RequestRefused, check=has_param("constraint")):
        LlguidanceGrammar("start: <|im_start|>", vocabulary)


@pytest.mark.model
def test_masks_of_the_default_model_are_those_of_the_dfa(model_folder):
    tokenizer = Tokenizer.from_folder(model_folder)
    vocabulary = LlguidanceVocabulary(tokenizer, tokenizer.vocab_size)
    pattern = r'\{"name": "[A-Z][a-zé]*", "n": -?[0-9]{1,3}\}'
    dfa = build_dfa(parse_regex(pattern))
    matcher = LlguidanceGrammar(pattern_payload(pattern), vocabulary).matcher()
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    state = START
    for text in ("", '{"', "name", '": "', "A", "dé", '", "', 'n": '):
        for token_id in tokenizer.encode(text, continues=True):
            matcher.accept(token_id)
            state = dfa.read(state, tokens[token_id])
        firsts = {one for one in map(bytes, zip(range(256))) if dfa.read(state, one) != DEAD}
        expected = [i for i, one in enumerate(tokens) if one[:1] in firsts and dfa.read(state, one) != DEAD]
        assert ids_of(matcher.mask()) == expected
        assert matcher.forced() == forced_by(dfa, state)
