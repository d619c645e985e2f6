"""The list of models with Anthropic's own client."""

from __future__ import annotations

from datetime import UTC, datetime

import anthropic
import pytest
from support.api_server import MODEL
from support.server.anthropic_peer import anthropic_peer


def test_models_are_listed_and_found() -> None:
    with anthropic_peer(constraints=False) as peer:
        [listed] = peer.client.models.list()
        found = peer.client.models.retrieve(MODEL)
        assert found == listed
        assert (found.id, found.type, found.display_name) == (MODEL, "model", MODEL)
        assert datetime(2020, 1, 1, tzinfo=UTC) < found.created_at <= datetime.now(UTC)
        with pytest.raises(anthropic.NotFoundError):
            peer.client.models.retrieve("unknown")


def test_f37_a_model_has_the_fields_that_the_client_requires() -> None:
    with anthropic_peer(constraints=False) as peer:
        found = peer.client.models.retrieve(MODEL)
        assert type(found).model_validate(found.to_dict(mode="json")).lifecycle == "active"


def test_f37_errors_of_all_paths_have_the_form_of_the_clients_api() -> None:
    with anthropic_peer(constraints=False) as peer:
        for ask in (
            lambda: peer.client.models.retrieve("unknown"),
            lambda: peer.client.get("/v1/nowhere", cast_to=object),
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                ask()
            body = caught.value.body
            assert isinstance(body, dict)
            assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
            assert caught.value.request_id == body["request_id"]
