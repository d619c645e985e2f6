"""Tenants with keys: ``ann`` and ``bob`` see their own work only, ``ops`` sees all numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentflow.server.tenants.keys import Tenants, hashed_key

KEYS = {"ann": "af-ann-secret", "bob": "af-bob-secret", "ops": "af-ops-secret"}


def tenants() -> Tenants:
    """All three."""
    tables = [
        f'[tenants.{name}]\nkeys = ["{hashed_key(key)}"]\nsees_metrics = {str(name == "ops").lower()}\n'
        for name, key in KEYS.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join(tables))
        return Tenants(file=file)
