"""API keys."""

from __future__ import annotations


def key_of_header(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key that a request brings."""
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    return x_api_key
