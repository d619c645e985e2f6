"""One schema enforced by a DFA and by a parser: both write the same, and all of it is valid."""

import json
import random

import jsonschema
from hypothesis import given
from hypothesis import strategies as st
from support.engine.schema_strategies import schemas, valid_value, written

from agentflow.engine.grammar.compiler.compile import _lark_of_schema
from agentflow.engine.grammar.compiler.explicit_schema import check_schema, explicit
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.json_schema import schema_to_regex
from benchmarks.constrained.text_walks import takes, text_under, walk


def both_forms(schema, whitespace):
    said = json.loads(json.dumps(schema))
    check_schema(said)
    said = explicit(said)
    regex = schema_to_regex(said, whitespace)
    forms = [CompiledConstraint("parser", "llguidance", _lark_of_schema(said, whitespace).encode())]
    if regex is not None:
        forms.append(CompiledConstraint("machine", "dfa", build_dfa(regex).to_bytes()))
    return forms


@given(schemas, st.sampled_from(["compact", "tight"]), st.randoms(use_true_random=False))
def test_both_take_what_is_valid_and_in_order(schema, whitespace, dice):
    forms = both_forms(schema, whitespace)
    for _ in range(3):
        text = written(valid_value(schema, dice), whitespace, dice)
        for form in forms:
            if form.key == "parser" and "\x7f" in text:
                continue  # of all characters the only one that it would escape and a DFA would not
            assert takes(form, text), (form.key, text)


@given(schemas, st.sampled_from(["compact", "tight", "free"]), st.integers(0, 99))
def test_texts_under_a_parser_are_valid(schema, whitespace, seed):
    parser = both_forms(schema, whitespace)[0]
    dice = random.Random(seed)
    for prefix in (b"", b'{"', b"[", b"-"):
        text = walk(text_under(parser), dice, prefix)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
