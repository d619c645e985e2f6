"""Regular expressions of clients: bounded in size, and in the memory that they keep."""

from __future__ import annotations

import gc
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from re import _parser

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.grammar.regex import parse_regex
from agentflow.errors import BadArgument
from agentflow.protocol.bounds.client_pattern import (
    CACHE_BYTES,
    MAX_WRITTEN_OUT,
    CannotCheck,
    InvalidPattern,
    PatternCache,
    compiled,
    doubtful_set,
    is_verbose,
    parsed,
    written_out,
)
from agentflow.protocol.bounds.schema_check import SchemaCheck
from agentflow.protocol.sampling import check_stop_regex
from agentflow.protocol.text.stop_pattern import StopPattern
from agentflow.protocol.text.transform import Transform, apply_transforms

ATOMS = [("a", 1), ("[a-c]", 1), (r"\w", 1), (r"\(", 1), ("[(]", 1), (r"\p{L}", 1)]
FORMS = ["{{{0}}}", "{{0,{0}}}", "{{,{0}}}?"]
COMMENTS = ["(?#()", "(?#{9})", "(?=)"]


@dataclass(frozen=True)
class Written:
    """A pattern, and the number of its characters and classes after all repeats are expanded by hand."""

    source: str
    size: int


def sequences(inner: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    def joined(parts: list[Written], comment: str) -> Written:
        return Written("".join([part.source for part in parts]) + comment, sum(part.size for part in parts))

    def repeated(part: Written, times: int, form: str) -> Written:
        return Written(f"(?:{part.source}){form.format(times)}", times * part.size)

    def either(parts: list[Written]) -> Written:
        # ``re`` joins alternatives that begin alike, and alternatives of one character.
        sources = [f"{number}-{part.source}" for number, part in enumerate(parts)]
        return Written(f"({'|'.join(sources)})", sum([2 + part.size for part in parts]))

    return st.one_of(
        st.builds(joined, st.lists(inner, min_size=1, max_size=4), st.sampled_from(["", *COMMENTS])),
        st.builds(repeated, inner, st.integers(1, 30), st.sampled_from(FORMS)),
        st.builds(either, st.lists(inner, min_size=2, max_size=3)),
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS).map(lambda atom: Written(*atom)), sequences, max_leaves=12)


@given(PATTERNS)
def test_a_size_is_never_below_that_of_the_expanded_pattern(pattern: Written) -> None:
    assert written_out(pattern.source) >= pattern.size


TOO_LARGE = [
    "(?:(?:ab|c){300}){300}",
    "(?:" + r"\w" * 200 + "(?#()){4000}",  # the bracket in the comment opens no group
    r"(?:(?:\p{L}b){300}){300}",
    "(?|(ab)|(cd)){20000}",  # syntax of ``regex`` alone
    "(?x)(?:" + r"\w" * 200 + "){ 1 0 0 0 }",  # white space inside braces, under the flag x
    "(?V1)(?:" + r"\w" * 100 + "[[a](]){10000}",  # a bracket in a nested set
]


@pytest.mark.parametrize("pattern", TOO_LARGE)
def test_a_pattern_that_is_too_large_is_compiled_nowhere(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        compiled(pattern)
    with pytest.raises(BadArgument):
        apply_transforms("ab", (Transform("regex", pattern),))
    with pytest.raises(BadArgument):
        check_stop_regex(pattern)
    for schema, text in (
        ({"pattern": pattern}, '"ab"'),
        ({"patternProperties": {pattern: False}}, '{"ab": 1}'),
    ):
        with pytest.raises(CannotCheck):
            SchemaCheck(schema).violations(text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\p{L}{1,40}(?:-\p{L}{1,40}){0,3}", "Anne-Sophie"),
        (r"^[^\"]{0,10000}$", "abc"),
        (r"(?:[a-zA-Z0-9_-]{1,63}\.){1,8}[a-z]{2,63}", "www.example.org"),
        (r"(?x) a  b", "ab"),
        (r"\{12\}", "{12}"),
        (r"\\p{2}", r"\pp"),
    ],
)
def test_a_pattern_that_is_small_enough_is_compiled(pattern: str, text: str) -> None:
    assert compiled(pattern).search(text)


@pytest.mark.parametrize("pattern", ["(", "(?P<a>a)(?P<a>b", "[b-a]", "(" * 5000 + ")" * 5000, "a" * 30_000])
def test_an_invalid_pattern_is_one_kind_of_error(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        compiled(pattern)


NUMBERS = count()


def _stop_pattern() -> None:
    source = f"stop {next(NUMBERS)}"
    check_stop_regex(source)
    StopPattern(source)


def _transform() -> None:
    apply_transforms("a 7", (Transform("regex", f"7|{next(NUMBERS)}"),))


def _invalid() -> None:
    with pytest.raises(InvalidPattern):
        compiled(f"(?P<a>{next(NUMBERS)})(?P=b)")


def _schema() -> None:
    check = SchemaCheck({"type": "string", "pattern": f"^a|{next(NUMBERS)}$"})
    assert check.violations('"ab"').paths == []


@pytest.mark.parametrize("use", [_stop_pattern, _transform, _invalid, _schema])
def test_patterns_of_clients_do_not_accumulate(
    use: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = PatternCache(20_000)
    for module in ("text.stop_pattern", "bounds.client_pattern", "bounds.schema_check"):
        monkeypatch.setattr(f"agentflow.protocol.{module}.compiled", small.compiled)
    for _ in range(300):
        use()
    before = _blocks()
    for _ in range(900):
        use()
    assert _blocks() - before < 400


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_a_cache_is_bounded_in_bytes_and_keeps_what_was_used_last() -> None:
    large = f"(?:[ab]c){{{MAX_WRITTEN_OUT // 30}}}"
    most = 3 * sys.getsizeof(regex.compile(large))
    cache = PatternCache(most)
    first = cache.compiled("first")
    for number in range(20):
        assert cache.compiled("first") is first
        latest = cache.compiled(f"{large}{number}")
        assert cache.compiled(f"{large}{number}") is latest
        assert cache.num_bytes <= most


def test_the_largest_pattern_fits_the_cache() -> None:
    largest = f"(?:(a)){{{MAX_WRITTEN_OUT // 4}}}"
    assert written_out(largest) <= MAX_WRITTEN_OUT
    assert sys.getsizeof(regex.compile(largest, cache_pattern=False)) < CACHE_BYTES / 2
    assert re.fullmatch(largest, "a" * (MAX_WRITTEN_OUT // 4))


@given(st.text("[]^-&~|ab\\#()?", max_size=12))
def test_doubtful_sets_are_those_of_which_python_warns(pattern):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            _parser.parse(pattern)
        except (re.error, OverflowError):
            return
    if not is_verbose(pattern):
        assert bool(doubtful_set(pattern)) == bool(seen)


@pytest.mark.parametrize("pattern", ["[[a]b]", "[+--b]", "[a||b]", "(?x)[a] # [[\n"])
def test_no_warning_comes_of_a_clients_pattern(pattern):
    parsed(pattern)  # warnings are errors in tests


@pytest.mark.parametrize("read", [parse_regex, check_stop_regex])
def test_two_threads_that_read_patterns_leave_the_filters_of_warnings(read, monkeypatch):
    """A thread that restores the filters which it found, while another thread has changed them, leaves the
    change for the whole process."""
    entered = {"first": threading.Event(), "second": threading.Event()}
    leaves = {"first": threading.Event(), "second": threading.Event()}

    def parse(*arguments):
        name = threading.current_thread().name
        if name in entered:
            entered[name].set()
            assert leaves[name].wait(10)
        return real(*arguments)

    real = _parser.parse
    monkeypatch.setattr(_parser, "parse", parse)
    threads = [threading.Thread(target=read, args=[f"[a-z]{name}"], name=name) for name in entered]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for thread in threads:
            thread.start()
            assert entered[thread.name].wait(10)
        for thread in threads:
            leaves[thread.name].set()
            thread.join(10)
        assert not warnings.filters
