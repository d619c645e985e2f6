"""The three methods of select, against a walk of the choices' tree. On the real model: tests/end_to_end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.text.state.choices import compute_scores, num_greedy_tokens


@st.composite
def choices(draw):
    """Different choices, and one log-probability for each prefix, as a model would give."""
    ids = draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple)
    )
    prefixes = sorted({tuple(one[: n + 1]) for one in ids for n in range(len(one))})
    # All different, so that no method has to break ties.
    values = draw(st.permutations(range(1, len(prefixes) + 1)))
    known = {prefix: -value / 7 for prefix, value in zip(prefixes, values, strict=True)}
    return ids, [[known[tuple(one[: n + 1])] for n in range(len(one))] for one in ids], known


def walk(ids, known):
    """Walks from the root, always to the likeliest next token of some choice; the choices at the end."""
    at: tuple[int, ...] = ()
    while True:
        nexts = {
            tuple(one[: len(at) + 1]) for one in ids if tuple(one[: len(at)]) == at and len(one) > len(at)
        }
        if not nexts:
            return list(at)
        at = max(nexts, key=known.__getitem__)


@given(made=choices())
def test_the_greedy_choice_is_where_a_greedy_walk_ends(made):
    ids, logprobs, known = made
    counts = num_greedy_tokens(ids, logprobs)
    best = max(range(len(ids)), key=counts.__getitem__)
    assert ids[best] == walk(ids, known)
    assert all(0 <= count <= len(one) for count, one in zip(counts, ids, strict=True))


@given(made=choices(), alone=st.floats(-5, 0))
def test_the_other_methods_compare_means(made, alone):
    ids, logprobs, _ = made
    means = [sum(values) / len(values) for values in logprobs]
    assert compute_scores("token_length_normalized", ids, logprobs, []) == means
    without = [[alone] * len(one) for one in ids]
    found = compute_scores("unconditional_likelihood_normalized", ids, logprobs, without)
    assert found == pytest.approx([value - alone for value in means])
