"""Token masks and the other results of a matcher, against trying every token."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine.random_dfas import dfa_of, dfas, tokens

from agentflow.engine.grammar.dfa import DEAD, START, Dfa
from agentflow.engine.grammar.grammar import TokenWords, is_allowed
from agentflow.engine.grammar.token_dfa import DfaGrammar, ForcedRuns, MaskMemory, Vocabulary


def ids_of(words: TokenWords, vocab_size: int) -> set[int]:
    """The tokens of a mask; bits behind the vocabulary must not be set."""
    assert not any(is_allowed(words, i) for i in range(vocab_size, len(words) * 32))
    return {i for i in range(vocab_size) if is_allowed(words, i)}


def tried(dfa: Dfa, state: int, vocabulary: Vocabulary) -> set[int]:
    """The brute force: each token's bytes, one after the other."""
    return {i for i, data in enumerate(vocabulary.token_bytes) if data and dfa.read(state, data) != DEAD}


@given(dfas(), tokens(), st.integers(0, 40))
@example(dfa_of([b"aaaa"]), [b"a" * n for n in range(5)] * 2, 0)
def test_a_mask_is_what_trying_every_token_gives(dfa: Dfa, token_bytes: list[bytes], num_more: int):
    vocabulary = Vocabulary(token_bytes, len(token_bytes) + num_more)
    grammar = DfaGrammar(dfa, vocabulary)
    for _ in range(2):  # made, and then remembered
        for state in range(START, len(dfa.transitions)):
            assert ids_of(grammar.mask(state), vocabulary.vocab_size) == tried(dfa, state, vocabulary)


@given(dfas(), tokens())
def test_masks_that_do_not_fit_are_made_again(dfa: Dfa, token_bytes: list[bytes]):
    vocabulary = Vocabulary(token_bytes)
    grammar = DfaGrammar(dfa, vocabulary, max_masks=1)
    for state in [*range(START, len(dfa.transitions))] * 2:
        assert ids_of(grammar.mask(state), vocabulary.vocab_size) == tried(dfa, state, vocabulary)


@given(st.lists(dfas(), min_size=1, max_size=4), tokens(), st.integers(0, 6), st.data())
def test_f37_masks_of_all_grammars_fit_a_limit(
    all_dfas: list[Dfa], token_bytes: list[bytes], most: int, data: st.DataObject
):
    """A dropped mask is computed again. At least one mask is kept."""
    vocabulary = Vocabulary(token_bytes)
    mask_bytes = 4 * vocabulary.num_words
    memory = MaskMemory(most * mask_bytes)
    grammars = [DfaGrammar(dfa, vocabulary, memory=memory) for dfa in all_dfas]
    for number in data.draw(st.lists(st.integers(0, len(grammars) - 1), max_size=40)):
        dfa = all_dfas[number]
        state = data.draw(st.integers(START, len(dfa.transitions) - 1))
        assert ids_of(grammars[number].mask(state), vocabulary.vocab_size) == tried(dfa, state, vocabulary)
        used = [each.mask_bytes for each in grammars]
        assert used[number]
        assert memory.nbytes == sum(used) <= max(most, 1) * mask_bytes
    del grammars
    assert memory.nbytes == 0


def test_f37_the_grammar_with_most_masks_drops_them():
    """Other grammars keep their masks."""
    letters = [bytes([byte]) for byte in b"abcdefgh"]
    vocabulary, texts = Vocabulary(letters), [b"abcdefgh", b"hgf"]
    memory = MaskMemory(6 * 4)
    walking, resting = (DfaGrammar(dfa_of([text]), vocabulary, memory=memory) for text in texts)
    kept = [resting.mask(state) for state in (START, START + 1)]
    for state in range(START, START + 8):
        walking.mask(state)
        assert all(resting.mask(START + i) is mask for i, mask in enumerate(kept))


@given(st.binary(min_size=1, max_size=40), st.integers(0, 3000), st.data())
def test_f37_forced_runs_fit_a_limit(text: bytes, max_bytes: int, data: st.DataObject):
    dfa = dfa_of([text])
    runs, at = ForcedRuns(dfa, max_bytes=max_bytes), [START]
    for byte in text:
        at.append(dfa.read(at[-1], bytes([byte])))
    for index in data.draw(st.lists(st.integers(0, len(text)), max_size=60)):
        assert runs.run(at[index]) == (text[index:], at[-1])
        assert runs.run_bytes <= max(max_bytes, len(text) + 200)


@given(dfas(), tokens(), st.data())
def test_a_matcher_walks_with_the_tokens_it_takes(dfa: Dfa, token_bytes: list[bytes], data: st.DataObject):
    vocabulary = Vocabulary(token_bytes)
    matcher = DfaGrammar(dfa, vocabulary).matcher()
    taken: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        state = dfa.read(START, b"".join(token_bytes[i] for i in taken))
        assert matcher.state == state
        assert ids_of(matcher.mask(), vocabulary.vocab_size) == tried(dfa, state, vocabulary)
        assert matcher.may_end() == dfa.accepting[state]
        alive = [byte for byte in range(256) if dfa.read(state, bytes([byte])) != DEAD]
        assert matcher.must_end() == (dfa.accepting[state] and not alive)
        if taken and data.draw(st.booleans()):
            count = data.draw(st.integers(0, len(taken)))
            matcher.roll_back(count)
            del taken[len(taken) - count :]
            continue
        token = data.draw(st.integers(0, len(token_bytes) - 1))
        if token in tried(dfa, state, vocabulary):
            is_open = matcher.accept(token)
            assert is_open == (not matcher.forced() and not matcher.may_end())
            taken.append(token)
        else:
            with pytest.raises(ValueError, match="not allowed"):
                matcher.accept(token)


@given(st.sets(st.binary(min_size=1, max_size=5), min_size=1, max_size=6))
def test_forced_text_is_the_common_prefix_of_all_texts(texts: set[bytes]):
    matcher = DfaGrammar(dfa_of(texts), Vocabulary([bytes([i]) for i in range(256)])).matcher()
    shortest = min(texts, key=len)
    common = 0
    while common < len(shortest) and len({text[: common + 1] for text in texts}) == 1:
        common += 1
    assert matcher.forced() == shortest[:common]


@given(tokens(), st.lists(st.sampled_from(list(b"ab\xc3\xff")), max_size=3).map(bytes))
def test_tokens_with_a_common_beginning(token_bytes: list[bytes], prefix: bytes):
    vocabulary = Vocabulary(token_bytes)
    expected = {i for i, data in enumerate(token_bytes) if data and data.startswith(prefix)}
    assert ids_of(vocabulary.beginning_with(prefix), vocabulary.vocab_size) == expected
    same = {i for i in expected if token_bytes[i] == prefix}
    assert ids_of(vocabulary.exactly(prefix), vocabulary.vocab_size) == same


def test_a_dfa_is_the_same_after_serialisation():
    dfa = dfa_of([b"yes", b"no"])
    again = Dfa.from_bytes(dfa.to_bytes())
    assert again.matches(b"yes")
    assert again.matches(b"no")
    assert not again.matches(b"n")
    assert (again.transitions == dfa.transitions).all()
