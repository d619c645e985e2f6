"""Pauses before further attempts."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from agentflow.runtime.backoff import doubled_s, pauses_s

seconds = st.floats(0.001, 100)


@given(first_s=seconds, factor=st.floats(1, 1000), num_failed=st.integers(1, 10**9))
def test_f47c_pauses_double_up_to_the_most(first_s, factor, num_failed):
    most_s = first_s * factor
    pause_s = doubled_s(first_s, most_s, num_failed)
    assert min(first_s, most_s) <= pause_s <= most_s
    assert doubled_s(first_s, most_s, num_failed + 1) == min(most_s, 2 * pause_s)


@given(first_s=seconds, factor=st.floats(1, 1000))
def test_f47d_clients_come_back_apart(first_s, factor):
    most_s = first_s * factor
    begins, *later = islice(pauses_s(first_s, most_s), 40)
    assert begins == 0.0
    for number, pause_s in enumerate(later, 1):
        whole_s = doubled_s(first_s, most_s, number)
        assert whole_s / 2 <= pause_s <= whole_s
