"""Token masks of a machine, against trying every token; and what a matcher says besides."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine.random_machines import machine_of, machines, tokens

from agentflow.engine.grammar.dfa import DEAD, START, Fsm
from agentflow.engine.grammar.grammar import TokenWords, is_allowed
from agentflow.engine.grammar.token_dfa import FsmGrammar, Vocabulary


def ids_of(words: TokenWords, vocab_size: int) -> set[int]:
    """The tokens of a mask; what lies behind the vocabulary must not be set."""
    assert not any(is_allowed(words, i) for i in range(vocab_size, len(words) * 32))
    return {i for i in range(vocab_size) if is_allowed(words, i)}


def tried(fsm: Fsm, state: int, vocabulary: Vocabulary) -> set[int]:
    """The brute force: each token's bytes, one after the other."""
    return {i for i, data in enumerate(vocabulary.token_bytes) if data and fsm.read(state, data) != DEAD}


@given(machines(), tokens(), st.integers(0, 40))
@example(machine_of([b"aaaa"]), [b"a" * n for n in range(5)] * 2, 0)
def test_a_mask_is_what_trying_every_token_gives(fsm: Fsm, token_bytes: list[bytes], num_more: int):
    vocabulary = Vocabulary(token_bytes, len(token_bytes) + num_more)
    grammar = FsmGrammar(fsm, vocabulary)
    for _ in range(2):  # made, and then remembered
        for state in range(START, len(fsm.transitions)):
            assert ids_of(grammar.mask(state), vocabulary.vocab_size) == tried(fsm, state, vocabulary)


@given(machines(), tokens())
def test_masks_that_do_not_fit_are_made_again(fsm: Fsm, token_bytes: list[bytes]):
    vocabulary = Vocabulary(token_bytes)
    grammar = FsmGrammar(fsm, vocabulary, max_masks=1)
    for state in [*range(START, len(fsm.transitions))] * 2:
        assert ids_of(grammar.mask(state), vocabulary.vocab_size) == tried(fsm, state, vocabulary)


@given(machines(), tokens(), st.data())
def test_a_matcher_walks_with_the_tokens_it_takes(fsm: Fsm, token_bytes: list[bytes], data: st.DataObject):
    vocabulary = Vocabulary(token_bytes)
    matcher = FsmGrammar(fsm, vocabulary).matcher()
    taken: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        state = fsm.read(START, b"".join(token_bytes[i] for i in taken))
        assert matcher.state == state
        assert ids_of(matcher.mask(), vocabulary.vocab_size) == tried(fsm, state, vocabulary)
        assert matcher.may_end() == fsm.accepting[state]
        alive = [byte for byte in range(256) if fsm.read(state, bytes([byte])) != DEAD]
        assert matcher.must_end() == (fsm.accepting[state] and not alive)
        if taken and data.draw(st.booleans()):
            count = data.draw(st.integers(0, len(taken)))
            matcher.take_back(count)
            del taken[len(taken) - count :]
            continue
        token = data.draw(st.integers(0, len(token_bytes) - 1))
        if token in tried(fsm, state, vocabulary):
            matcher.take(token)
            taken.append(token)
        else:
            with pytest.raises(ValueError, match="not allowed"):
                matcher.take(token)


@given(st.sets(st.binary(min_size=1, max_size=5), min_size=1, max_size=6))
def test_what_is_forced_is_what_all_texts_begin_with(texts: set[bytes]):
    matcher = FsmGrammar(machine_of(texts), Vocabulary([bytes([i]) for i in range(256)])).matcher()
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


def test_a_machine_survives_the_way_to_another_process():
    fsm = machine_of([b"yes", b"no"])
    again = Fsm.from_bytes(fsm.to_bytes())
    assert again.matches(b"yes")
    assert again.matches(b"no")
    assert not again.matches(b"n")
    assert (again.transitions == fsm.transitions).all()
