"""Constraints that a backend does not support: the client rejects them before an op is sent, and so does a
server."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.observed_backends import Observed

import agentflow as af
from agentflow.language.typed.values import value_type
from agentflow.protocol import ops
from agentflow.protocol.constraint import CONSTRAINT_KINDS, Constraint, TagRule
from agentflow.protocol.events import Capabilities

pytestmark = pytest.mark.anyio


KINDS = {
    "regex": {"regex": "a+"},
    "schema": {"schema": {"type": "object"}},
    "choices": {"type": bool},
    "grammar": {"grammar": "start: a"},
}


def tags(*rules: dict) -> Constraint:
    return Constraint("tags", msgspec.json.encode(rules).decode())


AGE = {"begin": "<age>", "kind": "regex", "source": "[0-9]+", "end": "</age>"}
WHO = {"begin": "<who>", "kind": "schema", "source": '{"type": "string"}', "end": "</who>"}


def test_f37_a_source_of_tags_that_nests_too_deeply_is_refused():
    nested = json.dumps([{**AGE, "more": None}]).replace("null", "[" * 50_000 + "]" * 50_000)
    with pytest.raises(af.errors.BadArgument, match="not a list of tags"):
        Constraint("tags", nested).check()


def test_valid_constraints():
    for whitespace in ("compact", "tight", "free"):
        for made in (Constraint("schema", "{}"), tags(AGE, WHO)):
            asked = msgspec.structs.replace(made, whitespace=whitespace, jump_forward=False)
            assert asked.check() is asked
            assert msgspec.json.decode(msgspec.json.encode(asked), type=Constraint) == asked
    assert tags(AGE, WHO).tags() == (TagRule(**AGE), TagRule(**WHO))
    assert (tags(AGE).has_schema, tags(AGE, WHO).has_schema) == (False, True)


def test_constraints_of_older_recordings_are_read():
    old = b'{"kind":"schema","source":"{}"}'
    assert msgspec.json.decode(old, type=Constraint) == Constraint("schema", "{}")
    assert msgspec.json.encode(Constraint("schema", "{}")) == old


REFUSED = [
    (Constraint("schema", "[" * 10_000_000), "schema: the source must have 1 to 200000"),
    (Constraint("regex"), "regex: the source must"),
    (Constraint("choices", choices=("a", "a")), "choices: 1 to 1000 different ones"),
    (tags(), "tags: 1 to 100"),
    (tags(*[{**AGE, "begin": f"<{n:03}>"} for n in range(101)]), "tags: 1 to 100"),
    (tags({**AGE, "begin": ""}), "tags: begin must be a string of 1 to 200 characters"),
    (tags({**AGE, "end": "x" * 201}), "tags: end must be a string of 1 to 200"),
    (tags({**AGE, "source": ""}), "regex: the source must have 1 to 200000"),
    (tags({**AGE, "kind": "choices"}), "the source is not a list of tags: Invalid enum value 'choices'"),
    (tags({"begin": "<age>"}), "the source is not a list of tags: .* missing required field `kind`"),
    (Constraint("tags", "<age>"), "the source is not a list of tags"),
    (Constraint("tags", '"\ud800"'), "the source is not a list of tags"),
    (tags(AGE, AGE), "tags: '<age>' begins a tag, and is part of '<age>', which begins another"),
    (tags(AGE, {**AGE, "begin": "x<age>"}), "tags: '<age>' begins a tag, and is part of 'x<age>'"),
    (Constraint("schema", "{}", whitespace="none"), "whitespace must be one of 'compact', 'tight', 'free'"),
    (Constraint("regex", "a", whitespace="tight"), "whitespace='tight' is for JSON schemas, not for regex"),
    (
        msgspec.structs.replace(tags(AGE), whitespace="free"),
        "whitespace='free' is for JSON schemas, not for tags",
    ),
    (Constraint("regex", "a", instead=Constraint("regex", "")), "regex: the source must"),
    (Constraint("regex", "a", apart=("b",)), "apart: at most 100, and only with instead"),
    (Constraint("regex", "a", instead=Constraint("regex", "b"), apart=("",)), "apart: each must be a string"),
    (Constraint("regex", "a", instead=tags(AGE)), "instead: a single constraint"),
    (
        Constraint("regex", "a", instead=Constraint("regex", "a", instead=Constraint("regex", "b"))),
        "instead: a single constraint",
    ),
    (
        msgspec.structs.replace(tags(AGE), instead=Constraint("regex", "a")),
        "instead: tags in free text",
    ),
    (Constraint("regex", "a", jump_forward=1), "jump_forward must be True or False, not 1"),
    (Constraint("regex", "a", string_chars=3), "string_chars must be 1 or more"),
    (Constraint("schema", "{}", list_items=0), "list_items must be 1 or more"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED)
def test_invalid_constraints_are_rejected(constraint, message):
    with pytest.raises(af.errors.BadArgument, match=message):
        constraint.check()


def test_the_patterns_of_numbers_are_schemas_too():
    for kind, name in ((int, "integer"), (float, "number")):
        constraint = value_type(type=kind).constraint
        assert constraint.as_one_of(CONSTRAINT_KINDS) is constraint
        found = constraint.as_one_of(["choices", "schema"])
        assert (found.check().kind, msgspec.json.decode(found.source)) == ("schema", {"type": name})
        assert constraint.as_one_of(["choices"]) is None
    assert Constraint("regex", "[0-9]+").as_one_of(["schema"]) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unsupported_constraint_is_rejected_before_an_op_is_sent(kind):
    backend = af.Scripted(["a"])
    others = tuple(other for other in KINDS if other != kind)
    backend.generator.capabilities = Capabilities("small", constraints=others)
    observed = Observed(backend)
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.NotSupported, match=f"'{kind}'"):
            s += af.user("first") + af.assistant(af.gen("r", **KINDS[kind]))
        assert observed.ops == [ops.Open(s.id)]
        assert await s.messages() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_rejects_an_unsupported_constraint(server, kind):
    able = server.generator.capabilities
    unable = msgspec.structs.replace(able, constraints=())
    async with af.session(server.url) as flow, flow.state() as s:
        await s
        server.call(lambda: setattr(server.generator, "capabilities", unable))
        try:
            s += "a" + af.gen("r", **KINDS[kind])
            with pytest.raises(af.errors.NotSupported, match=rf"'{kind}'"):
                await s["r"]
        finally:
            server.call(lambda: setattr(server.generator, "capabilities", able))
    await server.wait_until_idle()
