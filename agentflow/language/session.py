"""A session: one open backend, and the programs that run on it.

Every ``run``, ``stream``, ``map``, ``submit`` and ``state`` begins a run on the session's link
(``link.Link``), which holds the connection to the backend and the tasks.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

from agentflow.errors import AgentflowError, BadArgument
from agentflow.language.batch.embeddings import embed_texts
from agentflow.language.batch.inputs import Inputs, ItemT, KeyOf, ManyOf, Table
from agentflow.language.batch.map import (
    MapOptions,
    OnError,
    ProgramMap,
    ShowTally,
)
from agentflow.language.expressions import make_tuple
from agentflow.language.failures.mistakes import AsyncOnly
from agentflow.language.graphs.graph import Graph
from agentflow.language.graphs.trace import GraphRun
from agentflow.language.link import TRACE, Link
from agentflow.language.observing.runs import Runs
from agentflow.language.program import ProgramStream, check_program, execute, find_program_name
from agentflow.language.states.run import Run
from agentflow.language.states.state import RootState, State
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend
from agentflow.protocol.events import Capabilities, LiveGraph, Stats
from agentflow.protocol.ops import Objective

logger = logging.getLogger(__name__)

P = ParamSpec("P")
ArgTs = TypeVarTuple("ArgTs")
ResultT = TypeVar("ResultT")


class Session(AsyncOnly):
    """Runs programs on a backend. Made by ``af.session``; everything that it starts ends with its block. A
    session on a server connects again when the server is back: unfinished ops fail with ``ServerLost``, and
    later ops run on the new connection.

    >>> async with af.session() as flow:
    ...     print(flow.capabilities.model, flow.is_alive)
    ...     grade = await flow.run(judge, essay)
    scripted True
    """

    def __init__(self, backend: Backend, *, seed: int | None = None) -> None:
        self._link = Link(secrets.randbits(63) if seed is None else seed)
        self._backend = backend

    def _share(self, other: Session) -> None:
        """Becomes another view of a session."""
        self._link, self._backend = other._link, other._backend

    async def __aenter__(self) -> Session:
        try:
            await self._link.open(self._backend)
        except AgentflowError as error:
            # The message contains the fault and the advice; the place in the internals does not help a
            # program.
            logger.debug("a session could not be opened", exc_info=error)
            raise error.with_traceback(None) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.close(kind, error, trace)

    async def run(
        self,
        program: Callable[Concatenate[State, P], Awaitable[ResultT]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Runs a program on a new state and returns its result.

        Waits for everything the program started, and raises the first failure that no ``await`` in the
        program has raised. Cancelling the call cancels the whole run.

        >>> await flow.run(judge, essay)
        'A'
        """
        check_program(program, "run")
        self._link.check_alive()  # before it waits, which it can only in the session's event loop
        await self._link.starts.pause()
        return await execute(Run(self._link, name=find_program_name(program)), program, args, kwargs)

    @overload
    def stream(
        self,
        program: Callable[Concatenate[State, P], Awaitable[Any]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ProgramStream: ...
    @overload
    def stream(self, program: Graph, /, *args: str | Mapping[str, str], **kwargs: str) -> ProgramStream: ...
    def stream(self, program: Any, /, *args: Any, **kwargs: Any) -> ProgramStream:
        """Runs a program and yields its events as they come: ``TextDelta`` and ``VariableDone`` of every
        state, and ``RunDone`` with the result at the end. ``program`` may be a graph
        (``program.trace(...)``), with arguments as for ``submit``; each text comes when it is complete.

        >>> async for event in flow.stream(judge, essay):
        ...     if isinstance(event, af.TextDelta):
        ...         print(event.text, end="")
        """
        self._link.check_alive()
        self._link.check_runs()
        if isinstance(program, Graph):
            work = GraphRun(self._link, program, args, kwargs, is_streamed=True)
            return ProgramStream(self._link, work.run, work.result)
        check_program(program, "stream")
        run = Run(self._link, name=find_program_name(program))
        return ProgramStream(self._link, run, lambda: execute(run, program, args, kwargs))

    @overload
    def map(
        self, program: Graph, inputs: Inputs, *, on_error: OnError = ..., **options: Unpack[MapOptions]
    ) -> ProgramMap[Any]: ...
    @overload
    def map(
        self,
        program: Callable[[State, ItemT], Awaitable[ResultT]],
        inputs: ManyOf[ItemT],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[[State, ItemT], Awaitable[ResultT]],
        inputs: ManyOf[ItemT],
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    @overload
    def map(
        self,
        program: Callable[[State, *ArgTs], Awaitable[ResultT]],
        inputs: ManyOf[tuple[*ArgTs]],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[[State, *ArgTs], Awaitable[ResultT]],
        inputs: ManyOf[tuple[*ArgTs]],
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    @overload
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
        inputs: ManyOf[dict[str, Any]] | Table,
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT]: ...
    @overload
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
        inputs: ManyOf[dict[str, Any]] | Table,
        *,
        on_error: Literal["return"],
        **options: Unpack[MapOptions],
    ) -> ProgramMap[ResultT | Exception]: ...
    def map(
        self,
        program: Callable[Concatenate[State, ...], Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
        retries: int = 0,
        resume: str | os.PathLike[str] | None = None,
        key: KeyOf | None = None,
        batch: bool = False,
    ) -> ProgramMap[Any]:
        """Runs a program on each of many inputs. Results are in the order of the inputs.

        Await it for the list of results, or iterate over it in bounded memory (see ``ProgramMap``; enter it
        if you may stop early).

        Args:
            program: A program, or a graph (``program.trace(...)``), whose arguments are texts.
            inputs: An iterable or async iterable, also an endless one; a generator is closed when the map
                ends. Each input is the program's one argument after the state. A tuple is its positional
                arguments, a dict its keyword arguments (type checkers do not compare these with the
                program's). To pass a tuple or a dict itself, wrap it: ``((item,) for item in items)``. Of a
                dataframe (pandas, polars, pyarrow, or with ``__arrow_c_stream__``), the program gets the
                columns of a row that are its parameters.
            concurrency: The maximum number of inputs that run at the same time; by default, as many as the
                backend runs well in one batch, at most 64.
            progress: Shows a bar on stderr with the rate, the time left, the failures, the tokens, and the
                fraction of the prompts that was cached.
            on_error: With ``"raise"``, the first failure cancels the rest and is raised, with a note that
                contains the input. With ``"return"``, failures are among the results, and only errors that
                end the session or come from ``inputs`` are raised.
            retries: How often an input runs again after a failure that may pass: an overloaded or unreachable
                server (after the pause that it asks for), a failed engine, an invalid value, a
                ``ConnectionError`` or ``TimeoutError`` of the program.
            resume: A file that receives each result as a line of JSON when its input ends. A later map of the
                same program takes the results from it, and runs only the inputs that failed or are missing.
                The file ``.resume`` next to it holds the failures and other data for resuming. Results that
                are read back have the program's annotated return type.
            key: A field or a function that identifies an input in ``resume``; by default, its JSON does.
            batch: Runs the generations in batches of OpenAI or Anthropic, at half the price, within a day.
                The programs are traced; all generations of all inputs whose prompts are known then form one
                batch, and the next one follows when it has ended. With ``resume``, batches go on when the map
                ends early, and a later map continues them; otherwise they are cancelled. By default, at most
                10,000 inputs wait at the same time.

        Raises:
            DataDependent: With ``batch``, the control flow of the program depends on a generated value.
            NotSupported: With ``batch``, the model has no batches.
            BadArgument: ``resume`` has the ending of another format, such as ``.csv``, or is the file of
                another program, or another map writes to it, or values of the return type cannot be read back
                from their JSON.

        >>> grades = await flow.map(judge, essays, progress=True)
        >>> async for grade in flow.map(judge, essays):
        ...     print(grade)
        A
        A
        A
        """
        return ProgramMap(
            self._link,
            program,
            inputs,
            concurrency=concurrency,
            on_error=on_error,
            show=_shown() if progress else None,
            retries=retries,
            resume=resume,
            key=key,
            batch=batch,
            backend=self._backend,
        )

    async def submit(self, graph: Graph, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled program (``program.trace(...)``) with its arguments, given as to the program or in
        one dict: texts, and arguments of ``af.image`` and ``af.video``. The backend gets all of it in one op
        and returns only the result.

        >>> graph = judge.trace(dimensions=["clarity", "evidence"])
        >>> grade = await flow.submit(graph, {"essay": essay})
        """
        if not isinstance(graph, Graph):
            raise BadArgument(
                f"submit: give a graph, which program.trace(...) makes, not {graph!r}", param="graph"
            )
        return await GraphRun(self._link, graph, args, kwargs).result()

    def state(
        self,
        *,
        cache_salt: str = "",
        objective: Objective | None = None,
        program: str = "",
        model: str | None = None,
    ) -> RootState:
        """A state without a program. ``async with flow.state() as s`` ends it with the block and cancels
        unfinished ops; without ``async with`` it ends with ``s.close()`` or with the session.

        Args:
            cache_salt: States share cached KV only if their salts are equal.
            objective: As in ``s.hint``.
            program: States with the same name are siblings to the scheduler, which finishes the states of one
                program before it begins another's. Use it for one program that has a state for each call.
            model: One of ``flow.models``; by default the first.

        Raises:
            UnknownModel: The session has no such model.

        >>> async with flow.state() as s:
        ...     s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        ...     print(await s["answer"])
        Plants turn light into sugar.
        >>> s = flow.state()
        >>> s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        >>> print(await s["answer"])
        Plants turn light into sugar.
        """
        run = Run(self._link, cache_salt=cache_salt, objective=objective, program=program, model=model or "")
        return RootState(run.root)

    @overload
    async def embed(  # type: ignore[overload-overlap]  # a string is also an iterable of strings
        self,
        texts: str,
        *,
        model: str | None = ...,
        dimensions: int | None = ...,
        prompt: str | None = ...,
        prompt_name: str | None = ...,
        progress: bool = ...,
    ) -> list[float]: ...
    @overload
    async def embed(
        self,
        texts: Iterable[str],
        *,
        model: str | None = ...,
        dimensions: int | None = ...,
        prompt: str | None = ...,
        prompt_name: str | None = ...,
        progress: bool = ...,
    ) -> list[list[float]]: ...
    async def embed(
        self,
        texts: str | Iterable[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool = False,
    ) -> list[float] | list[list[float]]:
        """The embedding of a text, or the embeddings of several texts in their order, as lists of numbers.

        Many texts are sent in parts, so that they take bounded memory and leave room for others' requests.
        Cancelling the call cancels all of it.

        Args:
            texts: A text, or several.
            model: One of ``flow.capabilities.embedding_models``, or the name of a model of the session that
                makes embeddings; by default the first.
            dimensions: Keeps only this many leading dimensions, for models that are trained for it.
            prompt: A text to put before each text.
            prompt_name: The name of a prompt of the model to use instead, such as ``"query"``.
            progress: Shows a bar on stderr.

        Raises:
            NotSupported: The session has no embedding model (see ``embed_model`` of ``af.session``).
            UnknownModel: ``model`` is not one of its embedding models.
            PromptTooLong: A text is too long for the model.
            BadArgument: A text is empty, or another argument is invalid.

        >>> vectors = await flow.embed(["Plants turn light into sugar.", "Bees make honey."])
        >>> len(vectors), len(await flow.embed("How do plants eat?", dimensions=32))
        (2, 32)
        """
        if (trace := TRACE.get()) is not None:
            trace.needs_values("the embedding of a text")
        link = self._link
        wanted = ops.Embed(0, 0, "", (), model or "", dimensions, prompt, prompt_name)
        given = [texts] if isinstance(texts, str) else list(make_tuple(texts, "embed", "texts", "texts"))
        vectors = await embed_texts(link, given, wanted, _shown() if progress else None)
        return vectors[0] if isinstance(texts, str) else vectors

    def limit(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        """Limits all states of the session, from now on, to ``deadline_s`` seconds and to ``output_tokens``
        generated tokens together. Beyond that they fail with ``DeadlineExceeded`` or ``BudgetExceeded``.

        >>> flow.limit(output_tokens=100_000)
        """
        self._link.check_alive()
        self._link.check_runs()
        self._link.limit(deadline_s, output_tokens)

    async def stats(self) -> Stats:
        """The counters of the backend since its start, including batches. In a session with several
        ``models=``, they are the sums over all backends. Raises the error that ended the session;
        ``EngineFailed`` while an engine restarts (the session then continues).

        >>> before = await flow.stats()
        >>> grade = await flow.run(judge, essay)
        >>> (await flow.stats()).prompt_tokens > before.prompt_tokens
        True
        """
        return await self._link.stats()

    async def graph(self) -> LiveGraph:
        """The unfinished part of the session, as the scheduler sees it: the open states with the objective
        and the task group of their next requests, and all requests. ``print`` shows an outline.

        >>> async with flow.state() as s:
        ...     s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        ...     graph = await flow.graph()
        >>> graph.states[-1].objective
        'latency'
        """
        return (await self._link.graphs(of_tenant=False))[0]

    async def graphs(self) -> list[LiveGraph]:
        """The graphs of all sessions and programs of this tenant on the server, this session's first. Each
        has its own numbers. Without a server: of this session only.

        >>> [graph.num_states_left_out for graph in await flow.graphs()]
        [0]
        """
        return await self._link.graphs(of_tenant=True)

    def watch(self, *, interval_s: float = 0.5) -> AsyncIterator[list[LiveGraph]]:
        """Follows ``graphs()``: the graphs now, and then whenever something has changed, at most every
        ``interval_s`` (0.1 to 60) seconds. The backend sends only the changes, and a slow loop gets the
        newest graphs. States and nodes are in the order of their ids. Leaving the loop ends the watch, and
        so does another watch of the session. Raises the error that ended the session.

        >>> async for graphs in flow.watch():
        ...     print(graphs[0].num_states_left_out)
        ...     break
        0
        """
        return self._link.watch(interval_s)

    @property
    def runs(self) -> Runs:
        """The latest runs, at most 200: their programs, durations, tokens, and how they ended. Draws itself
        in a notebook.

        >>> grade = await flow.run(judge, essay)
        >>> flow.runs[-1].program
        'judge'
        """
        return self._link.runs

    @property
    def seed(self) -> int:
        """The seed from which the seeds of generations without one are derived.

        >>> flow.seed
        7
        """
        return self._link.seed

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities and the name of the default model.

        >>> flow.capabilities.model
        'scripted'
        """
        return self._link.capabilities

    @property
    def models(self) -> Mapping[str, Capabilities]:
        """The capabilities of each model of the session by name, the default first.

        >>> list(flow.models)
        ['scripted']
        """
        return self._link.models

    @property
    def is_alive(self) -> bool:
        """Whether the session is open: it has not ended, and no error has ended it for good.

        >>> flow.is_alive
        True
        """
        return self._link.is_alive

    @property
    def is_connected(self) -> bool:
        """Whether the session is open and its backend can be reached now: False while it connects to a lost
        server again. For checks of readiness.

        >>> flow.is_connected
        True
        """
        return self._link.is_connected

    def check_alive(self) -> None:
        """Raises the error that ended the session; ``StateClosed`` before `async with` and after its block.

        >>> flow.check_alive()
        """
        self._link.check_open()


def _shown() -> ShowTally:
    from agentflow.language.batch.progress import shown_on_stderr  # imports rich

    return shown_on_stderr
