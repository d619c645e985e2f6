"""Models by name: who finds which."""

from __future__ import annotations

import pytest
from fake_engine import TEMPLATE, FakeEngine
from wire_peer import WireGenerator

from agentflow.errors import UnknownModel
from agentflow.server.models import EngineModel, Models, OneGenerator
from agentflow.server.tenant import NOBODY_ELSE, Tenant

pytestmark = pytest.mark.anyio


def named(name: str) -> OneGenerator:
    model = OneGenerator(WireGenerator())
    model.name = name
    return model


async def test_a_model_is_found_by_its_name_and_the_first_is_the_default():
    models = Models([named("a"), named("b")])
    assert models.find(None, NOBODY_ELSE).name == "a"
    assert models.find("b", NOBODY_ELSE).name == "b"
    assert [model.name for model in models] == ["a", "b"]
    with pytest.raises(UnknownModel, match=r"there is no model 'c' here \(there are: a, b\)"):
        models.find("c", NOBODY_ELSE)
    await models.until_idle()


async def test_what_a_tenant_may_not_use_is_not_there_for_it():
    models = Models([named("a"), named("b")])
    only_b, nothing = Tenant("only b", models=("b",)), Tenant("nothing", models=("c",))
    assert models.find(None, only_b).name == "b"
    with pytest.raises(UnknownModel, match=r"there is no model 'a' here \(there are: b\)"):
        models.find("a", only_b)
    with pytest.raises(UnknownModel, match="allows no model"):
        models.find(None, nothing)
    assert models.seen_by(nothing) == []


async def test_a_tenant_has_one_generator_on_a_model_under_the_name_it_is_served_by():
    async with FakeEngine().open_client() as client:
        model = EngineModel("served", client, TEMPLATE)
        ann = model.generator(Tenant("ann"))
        assert ann is model.generator(Tenant("ann"))
        assert ann is not model.generator(Tenant("ben"))
        assert ann.capabilities.model == "served"
