"""Expressions that can be appended: arguments are checked where they are given, and sums keep their order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.language.expressions import RoleExpression
from agentflow.language.gen import GenExpression, SelectExpression
from agentflow.protocol.ops import MAX_CHOICES
from agentflow.protocol.sampling import GenParams


def test_a_gen_without_options_is_greedy():
    assert af.gen("x").params.given == ()
    assert af.gen("x").params.resolved().temperature == 0


def test_one_stop_string_needs_no_list():
    assert af.gen("x", stop="\n").params.stop == ("\n",)
    assert af.gen("x", stop=["a", "b"], stop_token_ids=[1, 2]).params.stop_token_ids == (1, 2)


@given(
    max_tokens=st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    stop_regex=st.none()
    | st.sampled_from(["a", r"\n\d+\.", "(?i)stop", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", '{"e']),
    top_logprobs=st.integers(0, 20),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8) | st.just("x" * 1024), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
)
def test_parameters_in_range_are_kept(**options):
    params = af.gen("x", **options).params
    for field, value in options.items():
        assert getattr(params, field) == (tuple(value) if isinstance(value, list) else value)


WRONG = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", [1]),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_k", 1.0),
    ("min_p", -0.5),
    ("min_p", 2),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x" * 1025]),
    ("stop", ["x"] * 65),
    ("stop", [1]),
    ("stop", 7),
    ("stop", None),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 3),
    ("stop_token_ids", [2**31]),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("logprobs", "yes"),
    ("min_tokens", -1),
    ("min_tokens", 257),  # more than max_tokens
    ("min_tokens", 1.0),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -2.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 101),
    ("repetition_penalty", math.inf),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {2**31: 1}),
    ("logit_bias", {"42": 1}),
    ("logit_bias", {True: 1}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("logit_bias", [(1, 1.0)]),
    ("logit_bias", 3),
    ("stop_regex", ""),
    ("stop_regex", "("),
    ("stop_regex", 5),
    ("stop_regex", b"x"),
    ("stop_regex", ["x"]),
    ("stop_regex", "x" * 513),
    ("top_logprobs", -1),
    ("top_logprobs", 21),
    ("top_logprobs", True),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=repr)
def test_a_parameter_out_of_range_is_rejected(field, value):
    with pytest.raises(af.errors.BadArgument) as caught:
        af.gen("x", **{field: value})
    assert caught.value.param == field


def test_equal_biases_are_equal_parameters_and_can_be_hashed():
    one, other = (af.gen("x", logit_bias=bias).params for bias in ({5: 1, 3: -2.5}, {3: -2.5, 5: 1}))
    assert one.logit_bias == ((3, -2.5), (5, 1))
    assert hash(one) == hash(other)
    assert af.gen("x", logit_bias={}).params == GenParams()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a{20001}", "smaller repeat counts"),
        ("a{3,20001}", "smaller repeat counts"),
        ("(?:(?:a?){60000}){60000}", "smaller repeat counts"),
        ("(?:[](]b{2}){5000}|" * 2 + "c", "smaller repeat counts"),
        ("(?:(?:a{30}){30}){30}", "smaller repeat counts"),
        ("a{" + "9" * 400 + "}", "repetition number is too large"),
        # Expressions with another possible reading:
        ("(?:end){e<=1}", "approximate matching"),
        ("(?:end){i}", "approximate matching"),
        (r"\\{s}", "approximate matching"),
        ("(?:end){2i+1d<=3}", "approximate matching"),
        ("[[a]b]", "Possible nested set"),
        ("(?x)a{1 0}", "verbose"),
        ("(?im-x:a)|(?ix:b)", "verbose"),
        # Arguments that only the engine would accept:
        (r"\p{Lu}", "bad escape"),
        ("(?R)", "unknown extension"),
        ("(a)|b(?i)", "global flags"),
    ],
)
def test_unsupported_stop_regexes_are_rejected(pattern, why):
    with pytest.raises(af.errors.BadArgument, match=why) as caught:
        af.gen("x", stop_regex=pattern)
    assert caught.value.param == "stop_regex"


def test_checking_a_pattern_does_not_match_it():
    """This one would take until the sun goes out, on a text of no characters."""
    for pattern in ("(?:a?|b?){99}(?!)", "(|){99}(?<=x)"):
        assert af.gen("x", stop_regex=pattern).params.stop_regex == pattern


@pytest.mark.parametrize("name", ["", None, 3, b"x", ["x"]])
@pytest.mark.parametrize("make", [af.gen, lambda name: af.select(name, ["a", "b"])])
def test_a_variable_needs_a_name(make, name):
    with pytest.raises(af.errors.BadArgument, check=has_param("name")):
        make(name)


@pytest.mark.parametrize(
    "choices",
    ["yes", 5, None, ["a", 5], [], ["a", ""], ["a", "b", "a"], [str(n) for n in range(MAX_CHOICES + 1)]],
)
def test_invalid_choices_are_rejected(choices):
    with pytest.raises(af.errors.BadArgument, check=has_param("choices")):
        af.select("pick", choices)


def test_a_select_accepts_the_maximum_of_choices_from_any_iterable():
    assert len(af.select("pick", [str(n) for n in range(MAX_CHOICES)]).choices) == MAX_CHOICES
    assert af.select("pick", iter(["a", "b"])).choices == ("a", "b")


def test_an_unknown_select_method_is_rejected():
    with pytest.raises(af.errors.BadArgument, match=r"'best'.*token_length_normalized"):
        af.select("pick", ["a"], method="best")


def test_a_sum_keeps_its_order():
    first, second = af.gen("a"), af.select("b", ["x", "y"])
    row = "one " + first + " two " + (second + " three") + "four"
    assert row.parts == ("one ", first, " two ", second, " three", "four")
    assert isinstance(first, GenExpression)
    assert isinstance(second, SelectExpression)


def test_a_sum_of_sums_is_flat():
    row = af.gen("a") + ""
    for number in range(3000):
        row = row + str(number)
    assert len(row.parts) == 3002
    assert not any(hasattr(part, "parts") for part in row.parts)


@pytest.mark.parametrize("role", [af.system, af.user, af.assistant])
def test_a_role_holds_its_parts(role):
    turn = role("a", "b")
    assert isinstance(turn, RoleExpression)
    assert (turn.role, turn.parts) == (role.__name__, ("a", "b"))


def test_f37_a_set_is_sorted():
    """A set's order differs between processes, so a recording would not fit."""
    words = {f"word {number:02}" for number in range(20)}
    assert list(af.select("x", words).choices) == sorted(words)
    assert list(af.gen("x", stop=words).params.stop) == sorted(words)

    def second() -> None: ...
    def first() -> None: ...

    offered = af.reply("x", tools={second, first}).offer
    assert [tool.name for tool in offered.tools] == ["first", "second"]
    with pytest.raises(af.errors.BadArgument, check=has_param("choices")):
        af.select("x", {"a", 3})
