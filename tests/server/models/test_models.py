"""Models are found by name, among the models that the tenant may use."""

from __future__ import annotations

import pytest
from support.fake_engine import TEMPLATE, FakeEngine
from support.session_peer import HangingGenerator

from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import BadArgument, UnknownModel
from agentflow.protocol.sampling import GenParams
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.models.models import EngineModel, Models, OneGenerator
from agentflow.server.programs.programs import open_programs
from agentflow.server.responses.background import open_background_runs
from agentflow.server.responses.keeping import LocalResponses
from agentflow.server.responses.store import ResponseStore
from agentflow.server.service import Service
from agentflow.server.tenants.keys import Tenants, hashed_key
from agentflow.server.websocket.sessions import open_sessions

pytestmark = pytest.mark.anyio


def named(name: str) -> OneGenerator:
    model = OneGenerator(HangingGenerator())
    model.name = name
    return model


async def test_a_model_is_found_by_its_name_and_the_first_is_the_default():
    models = Models([named("a"), named("b")])
    assert models.find(None, ANONYMOUS).name == "a"
    assert models.find("b", ANONYMOUS).name == "b"
    assert [model.name for model in models] == ["a", "b"]
    with pytest.raises(UnknownModel):
        models.find("c", ANONYMOUS)
    await models.until_idle()


async def test_a_tenant_does_not_see_models_that_it_may_not_use():
    models = Models([named("a"), named("b")])
    only_b, nothing = Tenant("only b", models=("b",)), Tenant("nothing", models=("c",))
    assert models.find(None, only_b).name == "b"
    with pytest.raises(UnknownModel):
        models.find("a", only_b)
    with pytest.raises(UnknownModel):
        models.find(None, nothing)
    assert models.seen_by(nothing) == []


async def test_a_tenant_has_one_generator_on_a_model_under_the_name_it_is_served_by():
    async with FakeEngine().open_client() as client:
        model = EngineModel("served", client, TEMPLATE)
        ann = model.generator(Tenant("ann"))
        assert ann is model.generator(Tenant("ann"))
        assert ann is not model.generator(Tenant("ben"))
        assert ann.capabilities.model == "served"


async def test_f25d_the_names_of_a_model_share_its_engine_and_its_cache():
    async with FakeEngine().open_client() as client:
        models = Models([EngineModel("served", client, TEMPLATE, aliases=["gpt-4o", "default"])])
        only_default = Tenant("ann", models=("default",))
        assert [model.name for model in models.seen_by(Tenant("ben"))] == ["served", "gpt-4o", "default"]
        assert [model.name for model in models.seen_by(only_default)] == ["default"]
        cached = []
        for name in (None, "gpt-4o", "default"):
            generator = models.find(name, Tenant("ben")).generator(Tenant("ben"))
            assert generator.capabilities.model == (name or "served")
            context = generator.open("")
            generator.fill(context, "The quick brown fox jumps over the lazy dog")
            end = await generator.generate(context, GenParams(max_tokens=2), lambda text: None)
            cached.append(end.usage.cached_tokens)
            generator.free(context)
        assert cached[0] == 0 < cached[1] == cached[2]
        assert len(list(models)) == 1  # for the metrics and the health check


async def test_the_counters_of_an_engine_are_counted_once():
    async with FakeEngine().open_client() as client:
        models = Models([EngineModel("served", client, TEMPLATE, aliases=["gpt-4o"]), named("other")])
        for sees_metrics, expected in (
            (True, ["scripted", "served"]),
            (False, ["scripted", "served", "gpt-4o"]),
        ):
            tenant = Tenant("ann", sees_metrics=sees_metrics)
            counted = models.of_session("other", tenant).counted
            assert [one.capabilities.model for one in counted] == expected


async def test_tenants_that_are_others_than_before():
    """A reload of the keys file changes them: one tenant has another share, one is gone."""
    async with FakeEngine().open_client() as client:
        model = EngineModel("served", client, TEMPLATE)
        models = Models([model, named("other")])
        ann, ben, nobody = (model.generator(Tenant(name)) for name in ("ann", "ben", ""))
        changed = Tenant("ann", weight=3.0, max_unfinished=2)
        models.keep_tenants([changed])
        assert ann.tenant == changed
        assert ann.open("").origin.weight == 3.0
        assert model.generator(changed) is ann
        assert model.generator(ANONYMOUS) is nobody
        assert model.generator(Tenant("ben")) is not ben
        # A request from before the change queries after it.
        assert model.generator(Tenant("ann")) is ann
        assert ann.open("").origin.weight == 3.0
        models.keep_tenants([changed, Tenant("carl", weight=2.0)])
        assert model.generator(Tenant("carl")).tenant.weight == 2.0


async def test_the_models_hear_of_a_keys_file_that_is_read_again(tmp_path):
    file = tmp_path / "keys.toml"
    entry = f'[tenants.ann]\nkeys = ["{hashed_key("af-ann")}"]\nweight = '
    file.write_text(entry + "2.0")
    async with FakeEngine().open_client() as client, open_sessions(ServerLimits()) as sessions:
        models, tenants = Models([EngineModel("served", client, TEMPLATE)]), Tenants(file=file)
        http = HttpLimits()
        responses = LocalResponses(ResponseStore(http.responses_bytes, http.response_lifetime_s))
        async with open_background_runs(1) as background, open_programs(http.programs) as programs:
            service = Service(
                models, sessions, tenants, ServerLimits(), http, background, programs, responses
            )
        [model] = models
        ann = model.generator(tenants.of("af-ann"))
        file.write_text(entry + "7.0")
        await service.reload_tenants()
        assert ann.open("").origin.weight == 7.0
        assert model.generator(tenants.of("af-ann")) is ann
        file.write_text(entry + "none")
        with pytest.raises(BadArgument):
            await service.reload_tenants()
        assert ann.open("").origin.weight == 7.0
