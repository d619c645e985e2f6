"""A constraint after compilation: what travels from the compiling process to the engine."""

from __future__ import annotations

from typing import Literal

import msgspec


class CompiledConstraint(msgspec.Struct, frozen=True, array_like=True):
    """``key``: equal for equal constraints of a tenant. ``payload``: an ``Fsm`` as
    ``Fsm.to_bytes`` writes it, or a grammar as ``llguidance`` takes it (UTF-8); empty where the key says it
    all to an engine that has had it before."""

    key: str
    form: Literal["fsm", "llguidance"]
    payload: bytes
