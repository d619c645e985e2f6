"""The tree of errors: its drawing, its codes, and how an error travels with its causes."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentflow as af
from agentflow import errors
from agentflow.protocol.events import MAX_ERROR_TEXT, ErrorInfo, StateFailed, VarFailed


def all_classes(root: type[errors.AgentflowError] = errors.AgentflowError) -> list[type]:
    found = [root]
    for child in root.__subclasses__():
        found += all_classes(child)
    return found


def drawn_parents() -> dict[str, str | None]:
    """Child to parent, read off the drawing in the module's docstring."""
    parents: dict[str, str | None] = {"AgentflowError": None}
    path = ["AgentflowError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1]
    return parents


def test_the_drawing_is_the_tree():
    real = {
        error.__name__: error.__mro__[1].__name__ if error is not errors.AgentflowError else None
        for error in all_classes()
    }
    assert drawn_parents() == real


def test_the_errors_that_programs_catch_are_names_of_the_package():
    caught = {
        name
        for name in af.__all__
        if isinstance(value := getattr(af, name), type) and issubclass(value, Exception)
    }
    assert caught == {
        "AgentflowError",
        "BudgetExceeded",
        "Cancelled",
        "DeadlineExceeded",
        "InvalidValue",
        "Overloaded",
        "PromptTooLong",
        "ServerLost",
    }
    assert all(getattr(af, name) is getattr(errors, name) for name in caught)


def test_every_class_has_a_code_of_its_own_and_is_found_by_it():
    codes = [error.code for error in all_classes()]
    assert len(set(codes)) == len(codes)
    for error in all_classes():
        again = errors.from_code(error.code, "what was wrong")
        assert type(again) is error
        assert str(again) == "what was wrong"


def test_a_code_from_a_newer_version_is_the_root_class():
    assert type(errors.from_code("something_new", "x")) is errors.AgentflowError


def test_errors_inherit_from_the_errors_of_python():
    assert issubclass(af.errors.BadArgument, ValueError)
    assert issubclass(af.errors.UnknownVariable, KeyError)
    assert str(af.errors.UnknownVariable("no 'x'")) == "no 'x'"  # not its repr, as of a KeyError


def one_info(causes: st.SearchStrategy[ErrorInfo | None]) -> st.SearchStrategy[ErrorInfo]:
    codes = st.sampled_from([error.code for error in all_classes()])
    limits = st.sampled_from([af.Overloaded.code, af.errors.RateLimited.code])
    waits = st.none() | st.floats(0, 1e9)
    texts = st.text(max_size=20)
    params = st.none() | st.text(min_size=1, max_size=20)
    usages = st.none() | st.builds(af.Usage, st.integers(0, 9))
    reasons = st.sampled_from([None, "sealed", "cancelled", "ended"])
    return st.one_of(
        st.builds(ErrorInfo, codes, texts, causes, param=params),
        st.builds(ErrorInfo, limits, texts, causes, retry_after_s=waits),
        st.builds(ErrorInfo, st.just(af.InvalidValue.code), texts, causes, text=params, usage=usages),
        st.builds(ErrorInfo, st.just(af.BudgetExceeded.code), texts, causes, param=params, usage=usages),
        st.builds(ErrorInfo, st.just(af.errors.StateClosed.code), texts, causes, reason=reasons),
    )


infos = st.recursive(one_info(st.none()), one_info, max_leaves=6)


@given(info=infos)
def test_an_error_is_sent_with_its_causes(info):
    error = info.to_exception()
    assert ErrorInfo.of(error) == info
    for event in (VarFailed(1, info), StateFailed(1, info)):
        for encode, decode in (
            (msgspec.json.encode, msgspec.json.decode),
            (msgspec.msgpack.encode, msgspec.msgpack.decode),
        ):
            assert decode(encode(event), type=VarFailed | StateFailed) == event


@given(info=infos)
def test_the_origin_is_the_last_cause(info):
    error: BaseException = info.to_exception()
    while error.__cause__ is not None:
        error = error.__cause__
    assert info.origin == ErrorInfo.of(error)


def test_a_long_text_is_not_sent_with_its_error():
    error = af.InvalidValue("too long")
    error.text = "x" * MAX_ERROR_TEXT
    assert ErrorInfo.of(error).text == error.text
    error.text += "x"
    assert ErrorInfo.of(error).text is None


def test_a_foreign_exception_is_sent_as_its_description():
    error = af.errors.EngineFailed("broken")
    error.__cause__ = ZeroDivisionError("by zero")
    info = ErrorInfo.of(error)
    assert info.cause == ErrorInfo("run_failed", "ZeroDivisionError('by zero')")
    assert isinstance(info.to_exception().__cause__, af.errors.RunFailed)


@pytest.mark.parametrize("make_cycle", [False, True])
def test_a_long_chain_of_causes_is_truncated(make_cycle):
    first = error = af.errors.RunFailed("0")
    for number in range(1, 10_000):
        error.__cause__ = af.errors.RunFailed(str(number))
        error = error.__cause__
    if make_cycle:
        error.__cause__ = first
    info = ErrorInfo.of(first)
    msgspec.json.encode(info)
    assert info.origin == ErrorInfo("run_failed", "15")
