"""The functions that open a session: ``af.session`` chooses its backend; ``af.open_session`` opens it without
a block; ``af.run`` and ``af.map`` run a program from synchronous code, in a new event loop.
"""

from __future__ import annotations

import contextvars
import operator
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

import anyio

from agentflow.backends.apis.addresses.environment_key import VENDOR_PREFIXES, environment_key, is_same_server
from agentflow.backends.apis.prices import Price
from agentflow.errors import AgentflowError, BadArgument, ProgramError, short_repr
from agentflow.language.batch.inputs import Inputs, ItemT, ManyOf, Table
from agentflow.language.batch.map import MapOptions
from agentflow.language.failures.stack_frames import without_internals
from agentflow.language.host import OpenSession, SessionHost
from agentflow.language.program import check_program
from agentflow.language.session import Session
from agentflow.language.states.state import State
from agentflow.protocol.backend import Backend
from agentflow.runtime.task_group import forget_loop, running_loop


class SessionOptions(TypedDict, total=False):
    """The options of ``af.session`` and ``af.open_session``. Also a type for functions that pass them on.

    Attributes:
        model: On a server, the name of one of its models; default: the first. In this process, a short name
            (``agentflow models`` lists them), ``OWNER/NAME`` on the Hugging Face hub, a model folder or a
            GGUF file; default: ``smollm2-135m``. A model of the hub is pulled if it is missing.
        models: Several models for the session, by the names that ``flow.state(model=…)`` and
            ``s.fork(…, model=…)`` use; the first is the default. Each is a model for this process as for
            ``model``, an address as for ``url``, or a backend.
        fallback: Models behind APIs, as addresses or backends, that answer if the first one fails.
        embed_model: The model for ``flow.embed``. On a server or at a vendor, the name of one of its
            embedding models; default: the first of an agentflow server. In this process, it is loaded in
            addition to ``model``.
        quantize: ``int8``, ``int4`` or ``fp8``. This and the next three options are for the engine in this
            process; ``af.Embedded`` has its other options.
        chat_template: A Jinja file that replaces the model's chat template.
        device: ``cpu``, ``cuda``, or ``cuda:1`` for the second GPU.
        kv_tokens: The size of the KV pool in tokens.
        api_key: Default: for a server the environment variable AGENTFLOW_API_KEY, for a vendor the variable
            of its client (``OPENAI_API_KEY``, ``ANTHROPIC_API_KEY``). It is for one server: where ``models``
            has several, give each as a backend with its key. AGENTFLOW_API_KEY goes to agentflow servers
            (``ws://``), this machine, the server in AGENTFLOW_URL and the first one of the session.
        backend: A backend such as ``af.Embedded``, ``af.Remote`` or ``af.Scripted``, instead of a url or a
            model.
        seed: Makes sampling reproducible, except for gens with a seed.
        max_cost: The most US dollars that calls to APIs may cost together. Each call reserves the highest
            cost that it can have before it is sent; one that could exceed the cap fails with
            ``BudgetExceeded``. Models of unknown price are refused.
        prices: ``af.Price`` by the name of the model, for models that the package ``genai-prices`` does not
            know.
        record: A file that receives all ops and events, for ``af.Replay`` and ``agentflow replay``. It
            contains prompts and answers in plain text.

    >>> options: af.SessionOptions = {"model": "smollm2-135m", "seed": 7}
    >>> async with af.session(**options) as flow:
    ...     print(flow.seed)
    7
    """

    model: str | None
    models: Mapping[str, str | os.PathLike[str] | Backend] | None
    fallback: Sequence[str | Backend] | None
    embed_model: str | None
    quantize: str | None
    chat_template: str | os.PathLike[str] | None
    device: str | None
    kv_tokens: int | None
    api_key: str | None
    backend: Backend | None
    seed: int | None
    max_cost: float | None
    prices: Mapping[str, Price] | None
    record: str | os.PathLike[str] | None


def session(url: str | None = None, **options: Unpack[SessionOptions]) -> Session:
    """A session on a server, on an engine in this process, or on a given ``backend``.

    Args:
        url: The server's address (``ws://…`` or ``wss://…``); the address of a server with OpenAI's API
            (``http://…/v1``); or a model of a vendor (``openai:MODEL``, ``anthropic:MODEL``). Default: the
            environment variable AGENTFLOW_URL. Without an address, an engine in this process runs the model.
        options: Fields of ``af.SessionOptions``: ``model``, ``models``, ``fallback``, ``embed_model``,
            ``quantize``, ``chat_template``, ``device``, ``kv_tokens``, ``api_key``, ``backend``, ``seed``,
            ``max_cost``, ``prices`` and ``record``.

    Raises:
        BadArgument: An option is unknown or invalid, or does not go with another one.

    >>> async with af.session() as flow:
    ...     grade = await flow.run(judge, essay)
    >>> async with af.session("ws://127.0.0.1:8410", seed=7) as flow:
    ...     flow.limit(deadline_s=60, output_tokens=5000)
    ...     grade = await flow.run(judge, essay)
    """
    if hasattr(url, "connect"):
        raise BadArgument(f"session: {short_repr(url)} is no url: give a backend as backend=…", param="url")
    for name in options.keys() - SessionOptions.__annotations__:
        near = get_close_matches(name, SessionOptions.__annotations__, 1)
        advice = f": did you mean {near[0]!r}?" if near else ""
        raise BadArgument(f"session: there is no option {name!r}{advice}", param=name)
    for name, value in {"url": url, **options}.items():
        if value is not None and name in _KINDS and not isinstance(value, _KINDS[name]):
            raise BadArgument(f"session: {name} must be a string, not {value!r:.200}", param=name)
    backend, record, seed = options.get("backend"), options.get("record"), options.get("seed")
    models = options.get("models")
    if seed is not None:
        try:
            seed = int(operator.index(seed))  # also one of numpy
        except TypeError:
            raise BadArgument(
                f"session: seed must be a whole number, not {seed!r:.200}", param="seed"
            ) from None

    def choose() -> Backend:
        if models is not None:
            return _several(models, url, options)
        return _with_fallback(_chosen_backend(url, options), url, options)

    if models is not None and backend is not None:
        raise BadArgument("session: models has all models: leave out backend", param="backend")
    if backend is None and _substitute is not None:
        backend, substitute_record = _substitute(choose)
        record = record or substitute_record
    elif backend is None:
        backend = choose()
    elif any(value is not None for value in (url, *_chosen(options, *_OF_MODEL, *_OF_ENGINE).values())):
        raise BadArgument(
            "session: a backend cannot be combined with a url, a model or options of an engine",
            param="backend",
        )
    elif isinstance(backend, type) or not callable(getattr(backend, "connect", None)):
        raise BadArgument(
            f"session: {backend!r:.200} is not a backend, such as af.Scripted(…) or af.Replay(…)",
            param="backend",
        )
    else:
        backend = _with_fallback(backend, None, options)
    if options.get("max_cost") is not None or options.get("prices") is not None:
        backend = _with_costs(backend, options)
    session_seed = getattr(backend, "session_seed", None)
    if session_seed is not None:  # a replay has the recorded one
        seed = session_seed(seed)
    if record is not None:
        from agentflow.recording.file import Recorded

        seed = secrets.randbits(63) if seed is None else seed
        backend = Recorded(backend, record, seed)
    return Session(backend, seed=seed)


def _with_fallback(backend: Backend, url: str | None, options: SessionOptions) -> Backend:
    """The backend with those that answer in its place, if there are any."""
    given = options.get("fallback")
    if given is None:
        return backend
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise BadArgument(
            f"session: fallback must be a list of addresses or backends, not {short_repr(given)}",
            param="fallback",
        )
    from agentflow.backends.apis.addresses.api_address import api_backend
    from agentflow.backends.apis.fallback import Fallback

    first = url or os.environ.get("AGENTFLOW_URL") or ""
    api_key = options.get("api_key")
    others = [
        api_backend(one, api_key if is_same_server(one, first) else None, first) or one
        if isinstance(one, str)
        else one
        for one in given
    ]
    return Fallback(backend, *others)


def _several(
    models: Mapping[str, str | os.PathLike[str] | Backend], url: str | None, options: SessionOptions
) -> Backend:
    """The backend of a session with several models."""
    if options.get("fallback") is not None:
        raise BadArgument(
            "session: give the fallback of each model in models, such as "
            'models={"small": af.Fallback("openai:…", "anthropic:…")}',
            param="fallback",
        )
    others = _chosen(options, *_OF_MODEL, *_OF_ENGINE)
    if url is not None or others:
        name = next(iter(others), "url")
        raise BadArgument(f"session: models has all models: leave out {name}", param=name)
    if not isinstance(models, Mapping) or not all(isinstance(name, str) and name for name in models):
        raise BadArgument(
            f"session: models must be a dict of names to models, not {short_repr(models)}", param="models"
        )
    addresses = [model for model in models.values() if isinstance(model, str) and _is_address(model)]
    are_of_one = bool(addresses) and all(is_same_server(addresses[0], one) for one in addresses[1:])
    if options.get("api_key") is not None and not are_of_one:
        raise BadArgument(
            "session: api_key is for the models of one server, and models has others: give backends with "
            "their keys, such as af.OpenAI(…, api_key=…)",
            param="api_key",
        )
    from agentflow.backends.several import Several

    first = next((address for address in addresses if not address.startswith(VENDOR_PREFIXES)), "")
    backends: dict[str, Backend] = {}
    for name, model in models.items():
        if isinstance(model, str) and _is_address(model):
            backends[name] = _chosen_backend(model, options, first)
        elif isinstance(model, str | os.PathLike):
            from agentflow.backends.local import Embedded

            backends[name] = Embedded(os.fspath(model))
        elif callable(getattr(model, "connect", None)):
            backends[name] = model
        else:
            raise BadArgument(
                f"session: model {name!r} must be a model's name, an address or a backend, not "
                f"{short_repr(model)}",
                param="models",
            )
    return Several(backends)


_OF_MODEL: Final = ("model", "embed_model")
_OF_ENGINE: Final = ("quantize", "chat_template", "device", "kv_tokens")
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "url": str,
    "model": (str, os.PathLike),
    "embed_model": (str, os.PathLike),
    "api_key": str,
}


def _chosen(options: SessionOptions, *names: str) -> dict[str, Any]:
    """The named options that have a value."""
    return {name: value for name, value in options.items() if name in names and value is not None}


Substitute: TypeAlias = Callable[[Callable[[], Backend]], tuple[Backend, Path | None]]
"""Returns the backend of a session, and where to record it. Its argument returns the backend that the session
chose."""

_substitute: Substitute | None = None


def current_substitute() -> Substitute | None:
    """The innermost scope's argument of ``substituted``; None outside of one."""
    return _substitute


@contextmanager
def substituted(substitute: Substitute) -> Iterator[None]:
    """A scope in which ``substitute`` chooses the backend of each session of this process that is given none.
    For tests of code that opens its own sessions."""
    global _substitute
    before, _substitute = _substitute, substitute
    try:
        yield
    finally:
        _substitute = before


_open = session  # for the functions with a parameter of the same name


async def open_session(url: str | None = None, **options: Unpack[SessionOptions]) -> OpenSession:
    """Opens a session that stays open until ``await flow.close()``, for notebooks: one cell opens it, others
    use it. The parameters are the same as in ``af.session``. In programs, prefer
    ``async with af.session(...)``, which cannot be left open by accident.

    >>> flow = await af.open_session()
    >>> await flow.run(judge, essay)
    'A'
    >>> await flow.close()
    """
    return await SessionHost(session(url, **options)).open()


def _with_costs(backend: Backend, options: SessionOptions) -> Backend:
    """The backend with the cap and the prices, which other sessions of it do not have."""
    from agentflow.backends.apis.prices import Costs, Spending, check_prices

    costs = Costs(Spending(options.get("max_cost")), check_prices(options.get("prices")))
    with_costs: Callable[[Costs], Backend] | None = getattr(backend, "with_costs", None)
    if with_costs is None or not getattr(backend, "is_paid", True):
        raise BadArgument(
            "session: max_cost and prices are for models behind an API, and this session has none",
            param="max_cost" if options.get("max_cost") is not None else "prices",
        )
    return with_costs(costs)


def _is_address(text: str) -> bool:
    return "://" in text or text.startswith(VENDOR_PREFIXES)


def _chosen_backend(url: str | None, options: SessionOptions, first: str | None = None) -> Backend:
    """The backend of an address. ``first``: the first address of the session, if it has several."""
    url = url or os.environ.get("AGENTFLOW_URL")
    of_engine = _chosen(options, *_OF_ENGINE)
    if url is None:
        from agentflow.backends.local import Embedded

        if isinstance(model := options.get("model"), str) and _is_address(model):
            raise BadArgument(
                f"session: model={model!r:.200} is an address, as in af.session({model!r:.200})",
                param="model",
            )
        return Embedded(**_chosen(options, *_OF_MODEL), **of_engine)
    if of_engine:
        name = next(iter(of_engine))
        raise BadArgument(
            f"session: {name} is an option of an engine in this process, and {url:.200} is a server (by url "
            "or AGENTFLOW_URL): its operator decides",
            param=name,
        )
    if url.startswith(VENDOR_PREFIXES):
        from agentflow.backends.apis.addresses.api_address import vendor_backend

        if _chosen(options, "model"):
            raise BadArgument(f"session: {url!r:.200} names the model: leave out model=", param="model")
        return vendor_backend(url, options.get("api_key"), options.get("embed_model"))
    api_key = options.get("api_key") or environment_key(url, first or url)
    if url.startswith(("http://", "https://")):
        from agentflow.backends.apis.addresses.asked_server import AskedServer

        return AskedServer(url, api_key=api_key, **_chosen(options, *_OF_MODEL))
    from agentflow.backends.remote import Remote

    return Remote(url, api_key=api_key, **_chosen(options, *_OF_MODEL))


P = ParamSpec("P")
ArgTs = TypeVarTuple("ArgTs")
ResultT = TypeVar("ResultT")


@overload
def run(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    /,
    *args: Any,
    session: Session | None,
    **kwargs: Any,
) -> ResultT: ...
@overload
def run(
    program: Callable[Concatenate[State, P], Awaitable[ResultT]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> ResultT: ...
def run(  # type: ignore[misc]  # ``session`` cannot be an argument of the program
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    /,
    *args: Any,
    session: Session | None = None,
    **kwargs: Any,
) -> ResultT:
    """Runs a program and returns its result, as ``await flow.run(...)`` does. For scripts: it opens
    ``session`` (default: ``af.session()``) and closes it afterwards.

    All other keyword arguments go to the program. Type checkers check the arguments against the program's
    signature, unless ``session`` is among them. ``ProgramError`` inside a running event loop, such as a
    notebook's: use ``await flow.run(...)`` there. Ctrl-C cancels the program and raises
    ``KeyboardInterrupt``.

    >>> af.run(judge, essay)
    >>> af.run(judge, essay, session=af.session("ws://127.0.0.1:8410", seed=7))
    """

    check_program(program, "run")
    if session is not None and not isinstance(session, Session):
        raise BadArgument(
            f"run: session must be an af.session(…), not {session!r:.200}: give a program's own argument of "
            "that name by position"
        )

    async def main() -> ResultT:
        async with _open() if session is None else session as flow:
            return await flow.run(program, *args, **kwargs)

    return _run_blocking(main, "run")


class SessionMapOptions(MapOptions, total=False):
    """The options of ``flow.map``, and the session."""

    session: Session | None


@overload
def map(
    program: Callable[[State, ItemT], Awaitable[ResultT]],
    inputs: ManyOf[ItemT],
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[[State, ItemT], Awaitable[ResultT]],
    inputs: ManyOf[ItemT],
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
@overload
def map(
    program: Callable[[State, *ArgTs], Awaitable[ResultT]],
    inputs: ManyOf[tuple[*ArgTs]],
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[[State, *ArgTs], Awaitable[ResultT]],
    inputs: ManyOf[tuple[*ArgTs]],
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
@overload
def map(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    inputs: ManyOf[dict[str, Any]] | Table,
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    inputs: ManyOf[dict[str, Any]] | Table,
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
def map(
    program: Callable[Concatenate[State, ...], Awaitable[Any]],
    inputs: Inputs,
    *,
    session: Session | None = None,
    **options: Any,
) -> list[Any]:
    """Runs a program on many inputs and returns the list of its results, as ``await flow.map(...)`` does, and
    with its options. For scripts: it opens ``session`` (default: ``af.session()``) and closes it afterwards.
    ``ProgramError`` inside a running event loop.

    >>> af.map(judge, essays, progress=True)
    """

    check_program(program, "map")

    async def main() -> list[Any]:
        async with _open() if session is None else session as flow:
            return await flow.map(program, inputs, **options)

    return _run_blocking(main, "map")


def _run_blocking(main: Callable[[], Awaitable[ResultT]], name: str) -> ResultT:
    if running_loop() is not None:
        raise ProgramError(
            f"af.{name}(...) would block the running event loop: "
            f"use `await flow.{name}(...)` inside `async with af.session() as flow`, "
            "or after `flow = await af.open_session()` in a notebook"
        )

    def run() -> ResultT:
        forget_loop()
        return anyio.run(main)

    try:
        return contextvars.copy_context().run(run)
    except KeyboardInterrupt:
        # Ctrl-C shows no traceback of the event loop's cancelled tasks.
        raise KeyboardInterrupt from None
    except AgentflowError as error:
        raise without_internals(error) from error.__cause__
    except Exception as error:
        raise without_internals(error)  # noqa: B904  # it keeps its own cause and context
