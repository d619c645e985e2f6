"""Faults of the library's own: the log explains one, and an error that goes to a client has only its id."""

from __future__ import annotations

import logging
import secrets

from agentflow.errors import EngineFailed


def incident(logger: logging.Logger, what: str, fault: BaseException) -> EngineFailed:
    """Logs the fault with its traceback; the error that says ``what`` failed, and where to read why.

    >>> raise incident(logger, "a websocket", fault)
    Traceback (most recent call last):
    agentflow.errors.EngineFailed: a websocket failed: the server's log explains it under incident 5f3a9c01
    """
    number = secrets.token_hex(4)
    logger.error("%s failed (incident %s)", what, number, exc_info=fault)
    return EngineFailed(f"{what} failed: the server's log explains it under incident {number}")
