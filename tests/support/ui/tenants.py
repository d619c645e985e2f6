"""Tenants with keys: ``ann`` and ``bob`` see their own work only, ``ops`` sees all numbers, and ``boss`` may
replace replicas, too."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentflow.server.tenants.keys import Tenants, hashed_key

KEYS = {"ann": "af-ann-secret", "bob": "af-bob-secret", "ops": "af-ops-secret", "boss": "af-boss-secret"}
SEES_METRICS = ("ops", "boss")


def tenants() -> Tenants:
    """All tenants."""
    tables = [
        f'[tenants.{name}]\nkeys = ["{hashed_key(key)}"]\n'
        f"sees_metrics = {str(name in SEES_METRICS).lower()}\n"
        f"manages_adapters = {str(name == 'boss').lower()}\n"
        for name, key in KEYS.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join(tables))
        return Tenants(file=file)
