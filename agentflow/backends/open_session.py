"""``af.session``: which backend a session runs on."""

from __future__ import annotations

import os
import secrets

from agentflow.backends.replay import replayed_seed
from agentflow.errors import BadArgument
from agentflow.language.session import Session
from agentflow.protocol.backend import Backend
from agentflow.recording.file import Recorded


def session(
    url: str | None = None,
    *,
    model: str | None = None,
    api_key: str | None = None,
    backend: Backend | None = None,
    seed: int | None = None,
    deadline_s: float | None = None,
    output_tokens: int | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Session:
    """A session on a backend.

    With ``url`` (``ws://…`` or ``wss://…``; default: the variable AGENTFLOW_URL) on that server, on
    its ``model`` of that name, or its first one; with ``backend`` on that; otherwise on the embedded
    engine, which runs ``model`` (a name that ``agentflow pull`` knows, or a Hugging Face folder;
    default ``smollm2-135m``) in this process. ``api_key``: the server's; default: the variable
    AGENTFLOW_API_KEY.
    ``deadline_s`` and ``output_tokens``: what all states of the session together may take, from when
    it is entered; more raises ``DeadlineExceeded`` or ``BudgetExceeded``. ``seed``: sampling without
    a seed of its own draws the same again for the same seed. ``record``: a file to write all ops and
    events to, for ``af.Replay`` and ``agentflow replay``. It holds prompts and answers as they are.

    >>> async with af.session() as flow:
    ...     grade = await flow.run(judge, essay)
    >>> async with af.session("ws://127.0.0.1:8410", deadline_s=60, output_tokens=5000) as flow:
    ...     grade = await flow.run(judge, essay)
    """
    for name, given in {"url": url, "model": model, "api_key": api_key}.items():
        kinds = (str, os.PathLike) if name == "model" else str
        if given is not None and not isinstance(given, kinds):
            raise BadArgument(f"session: {name} must be a string, not {given!r:.200}")
    if backend is None:
        backend = _chosen_backend(url, model, api_key)
    elif url is not None or model is not None:
        raise BadArgument("session: give a backend, or a url, or a model, not several of them")
    elif not callable(getattr(backend, "connect", None)):
        raise BadArgument(
            f"session: {backend!r:.200} is no backend: give af.Scripted(…), af.Replay(…) or the like"
        )
    seed = replayed_seed(backend, seed)
    if record is not None:
        seed = secrets.randbits(63) if seed is None else seed
        backend = Recorded(backend, record, seed)
    return Session(backend, seed=seed, deadline_s=deadline_s, output_tokens=output_tokens)


def _chosen_backend(url: str | None, model: str | None, api_key: str | None) -> Backend:
    url = url or os.environ.get("AGENTFLOW_URL")
    if url is None:
        from agentflow.backends.local import Embedded

        return Embedded(model) if model is not None else Embedded()
    from agentflow.backends.remote import Remote

    api_key = api_key or os.environ.get("AGENTFLOW_API_KEY") or None
    return Remote(url, api_key=api_key, model=model)
