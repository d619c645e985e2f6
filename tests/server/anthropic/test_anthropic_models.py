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
