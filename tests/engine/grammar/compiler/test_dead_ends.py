"""All that a compiled constraint allows can be continued to a complete text: dead ends are rejected, or left
out where the constraint means the same without them."""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.small_tokenizers import byte_level_of

from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import PartedConstraint
from agentflow.engine.grammar.grammar import Matcher
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import takes

WORDS = ['{"a', '": ', '"}', ", ", '", "', "ab", "xx", "12", "true", "]}"]
TOKENIZER = Tokenizer(byte_level_of(WORDS))
GRAMMARS = GrammarCache(TOKENIZER, TOKENIZER.vocab_size)

NAMES = ["a", "ab", "b", ""]
PATTERNS = [
    "^a$",
    "^ab?$",
    "^[ab]{1,2}$",
    "b",
    "^a",
    "^x{2}$",
    "^$",
    r"^\x01$",
    r"[\x00-\x1f]",
    r"^(?!a)\w$",
    "a$b",
]
LEAVES = [
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "string", "maxLength": 2},
    False,
    *[{"type": "string", "pattern": pattern} for pattern in PATTERNS],
    {"type": "string", "pattern": "^ab?$", "minLength": 2},
    {"allOf": [{"pattern": "^x{5}$"}, {"pattern": "^x{3}$"}]},
]


def objects(values):
    def an_object(members, patterns, required, others):
        schema = {"type": "object", "properties": members, "patternProperties": patterns, **others}
        return {**schema, "required": [name for name in required if name in members]}

    return st.builds(
        an_object,
        st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
        st.dictionaries(st.sampled_from(PATTERNS), values, max_size=2),
        st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        st.one_of(st.just({}), st.builds(lambda one: {"additionalProperties": one}, values)),
    )


SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one, other: {"allOf": [one, other]}, objects(inner), objects(inner)),
    ),
    max_leaves=6,
)


def compiled_or_none(constraint: Constraint):
    try:
        return compile_constraint(constraint.check())
    except BadArgument:
        return None


def write(matcher: Matcher, dice: random.Random, num_tokens: int = 40) -> bytes:
    """Writes tokens that are allowed. Fails if no token may follow a text that is not complete."""
    written = bytearray()
    for _ in range(num_tokens):
        bits = np.unpackbits(matcher.mask().view(np.uint8), count=TOKENIZER.vocab_size, bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            assert matcher.may_end(), bytes(written)
            break
        marks = [token for token in allowed if TOKENIZER.token_bytes(token)[-1:] in b'"{}[]:, ']
        token = dice.choice(marks if marks and dice.random() < 0.5 else allowed)
        matcher.accept(token)
        written += TOKENIZER.token_bytes(token)
    return bytes(written)


@given(SCHEMAS, st.integers(0, 999))
def test_f30a_no_text_under_a_schema_has_a_dead_end(schema, seed):
    constraint = compiled_or_none(Constraint("schema", json.dumps(schema)))
    assume(constraint is not None)
    for number in range(4):
        write(GRAMMARS.matcher(constraint), random.Random(seed + number))


REGEXES = ["[a-z]{2}", "x{5}", "x{3}", "x+", "a.*b", ".*b", "[^x]*", "ab?", "[^a-z]"]


@st.composite
def grammars(draw):
    """Lark grammars whose terminals are intersections and complements, some of them empty."""
    lines = []
    for name in "ABC":
        parts = draw(st.lists(st.sampled_from(REGEXES), min_size=1, max_size=2))
        lines.append(
            f"{name}: " + " & ".join([f"{draw(st.sampled_from(['', '~']))}/{part}/" for part in parts])
        )
    symbols = ["A", "B", "C", '"q"', '"-"', "one", "two"]
    for rule in ("start", "one", "two"):
        kinds = symbols[: 5 if rule == "two" else 7 if rule == "start" else 6]
        options = draw(
            st.lists(st.lists(st.sampled_from(kinds), min_size=1, max_size=3), min_size=1, max_size=3)
        )
        lines.append(f"{rule}: " + " | ".join([" ".join(option) for option in options]))
    return "\n".join(lines)


@given(grammars(), st.integers(0, 999))
def test_f30b_no_text_under_a_grammar_has_a_dead_end(source, seed):
    constraint = compiled_or_none(Constraint("grammar", source))
    assume(constraint is not None)
    for number in range(4):
        write(GRAMMARS.matcher(constraint), random.Random(seed + number))


@pytest.mark.parametrize(
    "source",
    [
        "start: A\nA: /x{5}/ & /x{3}/",
        'start: "a" | "q" A "c"\nA: /x{5}/ & /x{3}/',
        'start[capture]: "a" | "q" A\nA[capture] : B "c"\nB: /a.*b/ & ~/.*b/',
        'start: "a" | "q" /[^\\s\\S]/ "c"',
    ],
)
def test_f30c_a_terminal_without_texts_is_rejected(source):
    with pytest.raises(BadArgument):
        compile_constraint(Constraint("grammar", source))


def test_f30d_patterns_of_declared_names_are_left_out():
    """The pattern still applies to the declared members."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "ab": {"type": "integer", "maximum": 9}},
        "patternProperties": {"^ab?$": {"type": "integer", "minimum": 5}},
        "additionalProperties": False,
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert takes(constraint, '{"a": 7, "ab": 8}')
    assert not takes(constraint, '{"a": 3}')
    dice = random.Random(0)
    for _ in range(20):
        text = write(GRAMMARS.matcher(constraint), dice, 60)
        if text.endswith(b"}"):
            jsonschema.validate(json.loads(text), schema)


def test_f30e_an_object_whose_other_names_are_all_declared_or_matched_has_no_others():
    schema = {
        "type": "object",
        "properties": {"": {"type": "null"}},
        "patternProperties": {"^a": {"type": "null"}, "^[^a]": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert takes(constraint, '{"": null, "abc": null, "x": 7}')
    for seed in range(20):
        write(GRAMMARS.matcher(constraint), random.Random(seed))


def test_f30f_a_pattern_that_no_string_can_keep_is_rejected_or_relaxed():
    schema = json.dumps({"type": "object", "properties": {"key": {"type": "string", "pattern": r"^\x01$"}}})
    with pytest.raises(BadArgument, match="key"):
        compile_constraint(Constraint("schema", schema))
    relaxed = compile_constraint(PartedConstraint.relaxable(Constraint("schema", schema)))
    assert [one.path for one in relaxed.relaxed] == [("properties", "key", "pattern")]
    assert takes(relaxed, '{"key": "any"}')
