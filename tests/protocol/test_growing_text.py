"""Texts that arrive in parts, against plain strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.growing_text import GrowingText

PLACES = st.integers(0, 12)
STEPS = st.one_of(
    st.tuples(st.just("put"), PLACES, st.text(max_size=5)),
    st.tuples(st.just("add"), st.just(0), st.text(max_size=5)),
    st.tuples(st.just("part"), PLACES, st.just("")),
    st.tuples(st.just("end"), st.just(0), st.just("")),
)


@given(start=st.text(max_size=5), steps=st.lists(STEPS, max_size=12), most=st.integers(-1, 6))
def test_f37_a_text_that_grows_is_read_like_a_string(
    start: str, steps: list[tuple[str, int, str]], most: int
) -> None:
    text, plain = GrowingText(start), start
    for step, at, part in steps:
        match step:
            case "put":
                text.put(at, part)
                plain = plain[:at] + part
            case "add":
                text.put(len(text), part)
                plain += part
            case "part":
                assert text.part(at, most) == (plain[at:] if most < 0 else plain[at : at + most])
            case "end":
                text.end()
        assert (str(text), len(text), text.part(at)) == (plain, len(plain), plain[at:])
