"""Tracing: a program becomes a graph by running without a model.

``trace`` calls the program with a ``TraceLink``, which collects its ops. Text arguments that are not given,
and all awaited values, are stand-ins: they can be appended, transformed and returned, and any use that needs
the value raises ``DataDependent`` with the line. Arguments of the type ``af.Image`` or ``af.Video`` stand for
the files that a run has. Code between the ops, such as a loop over a given list, runs
once, during the trace. ``GraphRun`` runs a graph: the backend gets it in one op and returns the result.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args

import msgspec

from agentflow.errors import BadArgument, DataDependent, short_repr
from agentflow.language.expressions import (
    Appendable,
    Expression,
    ImageExpression,
    MediumExpression,
    Sequence_,
    VideoExpression,
)
from agentflow.language.failures.mistakes import defined_at
from agentflow.language.failures.stack_frames import (
    ProgramLine,
    calling_line,
    is_in_program,
    program_line,
)
from agentflow.language.failures.user_code import UserCode
from agentflow.language.graphs.graph import Graph, MediumArgument
from agentflow.language.graphs.graph_result import (
    GraphOutput,
    Output,
    Place,
    VariableText,
    filled,
    make_result,
    outputs_in,
)
from agentflow.language.link import TRACE, Link
from agentflow.language.markers import MARKERS
from agentflow.language.media import image, video
from agentflow.language.observing.spans import RunSpan
from agentflow.language.states.reported import left_by, program_failure
from agentflow.language.states.run import Run, StateNode, VariableNode
from agentflow.language.states.state import State
from agentflow.language.states.variable import Reference, Variable
from agentflow.language.typed.values import TEXT
from agentflow.language.uploads import images_in
from agentflow.protocol import ops
from agentflow.protocol.constraint import CONSTRAINT_KINDS
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, MediumKind, Video, file_source
from agentflow.protocol.op_table import ROOT, StateModels, check_sent, numbers, op_spec
from agentflow.protocol.sampling import seed_run
from agentflow.protocol.text.transform import Transform, TransformName, apply_in_turn

ResultT = TypeVar("ResultT")

_EVERYTHING = Capabilities(
    model="a trace", constraints=CONSTRAINT_KINDS, images=True, videos=True, conversations=True
)


def called(program: Callable[..., Awaitable[ResultT]], /, *args: Any, **kwargs: Any) -> Awaitable[ResultT]:
    """Calls the program; the result is to be awaited. ``BadArgument`` if the function is not async."""
    running = program(*args, **kwargs)
    if not inspect.isawaitable(running):
        advice = "an async function, so write `async def`"
        if inspect.isasyncgen(running):
            advice = "no generator: it returns its result, and flow.stream yields its texts"
        raise BadArgument(
            f"{defined_at(program)}, returned {short_repr(running)}, which cannot be awaited: a program is "
            f"{advice}"
        )
    return running


def trace(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of ``function``, called with these arguments after its state; see ``Program.trace``."""
    link = _TraceLink()
    run = Run(link, name=function.__name__)
    arguments, media, order, bound = _bound(function, run.root, args, kwargs)
    token = TRACE.set(link)
    try:
        with UserCode(f"program {function.__name__!r}"):
            result = _driven(called(function, *bound.args, **bound.kwargs), function.__name__)
    finally:
        TRACE.reset(token)
    if link.cancelled_at is not None:
        raise DataDependent(f"{link.cancelled_at}: a state is cancelled, which a graph cannot do")
    return Graph(
        name=function.__name__,
        ops=tuple([op for op in link.collected if isinstance(op, ops.Open) or op_spec(op).in_graph]),
        arguments=arguments,
        result=make_result(result, function.__name__, _Outputs(function.__name__, media)),
        places=run.places,
        images=tuple(link.images),
        media=media,
        order=order,
        value_types={variable.id: variable.value_type for state in run.states for variable in state.shown},
    )


class _AnyModels(StateModels):
    """The models of a trace: it runs on none, and each model can do everything."""

    def __init__(self) -> None:
        super().__init__({"": _EVERYTHING})

    def named(self, name: str) -> Capabilities:
        return _EVERYTHING


class _TraceLink(Link):
    """Collects ops, and reports no events."""

    is_tracing = True

    def __init__(self) -> None:
        super().__init__(seed=0)
        self._models = _AnyModels()
        self.collected: list[ops.Op] = []
        self.images: list[Image] = []
        self.cancelled_at: ProgramLine | None = None

    @property
    def is_alive(self) -> bool:
        return True

    def check_alive(self) -> None:
        pass

    def check_loop(self) -> None:
        pass

    def send_checked(self, recorded: list[ops.Op]) -> None:
        for op in recorded:
            check_sent(op)
            self.images += images_in(op)
        self.collected += recorded
        if self.cancelled_at is None and any(isinstance(op, ops.Cancel) for op in recorded):
            self.cancelled_at = calling_line()

    def needs_values(self, what: str) -> NoReturn:
        raise _data_dependent(what)

    def stand_in(self, node: Any) -> Any:
        return _StandIn(node) if node.value_type.is_text else _ValueStandIn(node)


_AS_INTEGER = Transform("regex", "-?[1-9][0-9]*|0")
"""Writes a text that is an integer as Python writes the integer: without the sign of ``-0``."""


def _shown_class(asked: _StandIn | _Sum) -> type:
    """The class of a stand-in: for ``isinstance`` in the program, the class that it has in a run."""
    return asked._class_in_run() if is_in_program(sys._getframe(1)) else type(asked)


class _StandIn(Reference[str]):
    """A text that does not exist: an argument of the program, or a value that it has awaited."""

    __class__ = property(_shown_class)

    def __init__(self, node: VariableNode, transforms: tuple[Transform, ...] = ()) -> None:
        super().__init__(node, transforms)
        node.kept[MARKERS.next_number()] = self

    @property
    def _label(self) -> str:
        return f"the value of {self._node.name!r}"

    def _then(self, name: TransformName, argument: str = "") -> Any:
        return _StandIn(self._node, super()._then(name, argument)._transforms)

    def __await__(self) -> Generator[object, None, NoReturn]:
        raise BadArgument(f"{self._label} is a value already: it cannot be awaited")

    def _class_in_run(self) -> type:
        return str

    def _refuse(self, what: str) -> NoReturn:
        raise _data_dependent(f"{self._label} is {what}, and the program's next ops may depend on it")

    def __str__(self) -> str:
        self._refuse("converted to a string")

    def __iter__(self) -> NoReturn:
        self._refuse("iterated over")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asked for its attribute {name!r}")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compared")

    __ne__ = __eq__

    def __hash__(self) -> NoReturn:
        self._refuse("hashed, as a key or a member of a set")

    def __add__(self, other: Appendable) -> Sequence_:
        return _Sum(super().__add__(other).parts)

    def __radd__(self, other: Appendable) -> Sequence_:
        return _Sum(super().__radd__(other).parts)


class _ValueStandIn(_StandIn):
    """A value that does not exist, and is no text: of a ``gen`` with a type, for example."""

    def _class_in_run(self) -> NoReturn:
        self._refuse("asked for its type")

    def _then(self, name: TransformName, argument: str = "") -> NoReturn:
        self._refuse(f"asked for its method {name!r}")

    def __format__(self, spec: str) -> str:
        is_integer = not spec and self._node.value_type.shown == "int"
        return f"{_StandIn(self._node, (_AS_INTEGER,))}" if is_integer else super().__format__(spec)

    def check_sendable(self) -> NoReturn:
        raise _data_dependent(
            f"a prompt has {self._label} in Python's form, which is not its text (for the text, leave out "
            f"the await: s[{self._node.name!r}])"
        )


class _Sum(Sequence_):
    """A sum with stand-ins: a text that does not exist."""

    __slots__ = ()
    __class__ = property(_shown_class)

    def _class_in_run(self) -> type:
        return str

    def __add__(self, other: Appendable) -> Sequence_:
        return _Sum((self, other))

    def __radd__(self, other: Appendable) -> Sequence_:
        return _Sum((other, self))

    def _refuse(self, what: str) -> NoReturn:
        raise _data_dependent(f"a text with a generated value is {what}, and the next ops may depend on it")

    def __bool__(self) -> NoReturn:
        self._refuse("tested for truth")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compared")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __hash__(self) -> NoReturn:
        self._refuse("hashed, as a key or a member of a set")

    def __len__(self) -> NoReturn:
        self._refuse("measured")

    def __contains__(self, item: object) -> NoReturn:
        self._refuse("searched")

    def __iter__(self) -> NoReturn:
        self._refuse("iterated over")

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse("indexed")

    def __str__(self) -> NoReturn:
        self._refuse("converted to a string")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asked for its attribute {name!r}")


def _data_dependent(what: str) -> DataDependent:
    advice = "a trace has no values. Use flow.run, or give the value to trace(...)"
    return DataDependent(f"{program_line() or 'the program'}: {what}: {advice}")


def _bound(
    function: Callable[..., Any], root: StateNode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, int], dict[str, MediumArgument], tuple[str, ...], inspect.BoundArguments]:
    """The variables of the graph's texts and its images and videos, by name, the names of both in order, and
    the arguments of the call. Stand-ins take the place of missing arguments. ``BadArgument`` for a missing
    argument of another type."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(State(root), *args, **kwargs)
    except TypeError as error:
        raise BadArgument(f"trace of {function.__name__}: {error}") from None
    arguments: dict[str, int] = {}
    media: dict[str, MediumArgument] = {}
    order: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in bound.arguments or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.annotation in (str, "str", parameter.empty):
            node = root.expect_text(parameter.name)
            arguments[parameter.name] = node.id
            bound.arguments[parameter.name] = _StandIn(node)
        elif (
            kind := _medium_kind(parameter.annotation)
        ) is not None and parameter.default is parameter.empty:
            # No file has this digest, because no file begins like this.
            source = file_source(f"argument {parameter.name}".encode())
            media[parameter.name] = MediumArgument(kind, source)
            file = Image(source)
            shown = VideoExpression(file) if kind == "video" else ImageExpression(file)
            bound.arguments[parameter.name] = shown
        elif parameter.default is parameter.empty:
            raise BadArgument(
                f"trace of {function.__name__}: {parameter.name!r} is no text, image or video: "
                f"give its value: trace({parameter.name}=…)",
                param=parameter.name,
            )
        else:
            continue
        order.append(parameter.name)
    bound.apply_defaults()
    return arguments, media, tuple(order), bound


_KINDS: Mapping[Any, MediumKind] = {ImageExpression: "image", VideoExpression: "video"}
_NAMES: Mapping[str, MediumKind] = {"Image": "image", "Video": "video"}


def _medium_kind(annotation: Any) -> MediumKind | None:
    """Whether a parameter is an image or a video, perhaps among other types, such as a path."""
    if isinstance(annotation, str):  # it may be undefined here
        names = [name.strip() for name in annotation.split("|")]
        found = [_NAMES.get(name.removeprefix("af.").removeprefix("agentflow.")) for name in names]
    else:
        found = [_KINDS.get(one) for one in (annotation, *get_args(annotation))]
    return next((kind for kind in found if kind is not None), None)


def _driven(awaitable: Awaitable[Any], name: str) -> Any:
    """Runs the awaitable and returns its result. Nothing in a trace waits, so one step completes it."""
    steps = awaitable.__await__()
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    steps.close()
    raise DataDependent(
        f"{name} waits for something that is not the model: a trace cannot. Await variables one by one, or by"
        " branches.gather(…)"
    )


class _Outputs:
    """The outputs of the values in a program's result."""

    def __init__(self, name: str, media: Mapping[str, MediumArgument]) -> None:
        self._name = name
        self._media = {medium.source: name for name, medium in media.items()}

    def __call__(self, item: Expression, place: Place) -> Any:
        """The output of an expression, which is at this place."""
        if isinstance(item, _StandIn):
            if place == "sum" and item._node.value_type is not TEXT:
                raise DataDependent(f"{self._name} returns a sum with {item._label}, which is no text")
            if item._transforms:
                return VariableText(item._node.id, item._transforms)
            return GraphOutput(item._node.id)
        if isinstance(item, Reference):
            if place != "value":
                return VariableText(item._node.id, item._transforms)
            raise BadArgument(f"{self._name} returns {item._label}, not awaited: await it, or set a variable")
        if place != "value":
            raise BadArgument(f"{self._name} returns a text with an expression: append it to a state")
        if isinstance(item, MediumExpression) and item.file.source in self._media:
            argument = self._media[item.file.source]
            raise DataDependent(
                f"{self._name} returns its argument {argument!r}, a file that a trace does not have: give it "
                f"to trace({argument}=…), or use flow.run"
            )
        return item


class GraphRun:
    """A graph that is sent with the texts of its arguments.

    Args:
        link: The session's link.
        graph: The graph.
        args: The arguments by position, or one dict of all of them: texts, and arguments of
            ``af.image`` and ``af.video``.
        kwargs: The arguments by name.
        index: As in ``Run``.
        objective: As in ``Run``.
        group: As in ``Run``.
        is_streamed: The backend reports all generated texts, not only the texts that the result needs.

    Raises:
        BadArgument: An argument is missing, unknown, given twice, or of another type.
    """

    def __init__(
        self,
        link: Link,
        graph: Graph,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        index: int | None = None,
        objective: ops.Objective | None = None,
        group: str = "",
        is_streamed: bool = False,
    ) -> None:
        values, files = _inputs(graph, args, kwargs)
        MARKERS.reject(values.values(), f"an argument of graph {graph.name!r}")
        graph_ops = _with_files(graph, files)
        base = link.reserve_ids(max([max(numbers(op)) for op in graph_ops]))
        index = link.next_run_index() if index is None else index
        record = link.runs.begin(graph.name, link.spans)
        reports_all = is_streamed or link.shares_tokens
        op = ops.SubmitGraph(
            base + ROOT,
            _placed(graph_ops if record.span is None else _traced(graph_ops, record.span), objective, group),
            inputs=values,
            outputs=tuple(graph.generated if reports_all else graph.outputs),
            seeds=seed_run(link.seed, index),
            places=dict(graph.places) if link.capabilities.seeds else {},
        )
        try:
            link.send([op])
        except BaseException as error:
            record.fail(error)
            record.end()
            raise
        opening = graph_ops[0]
        model = opening.model if isinstance(opening, ops.Open) else ""
        self.run = Run(link, index=index, root_id=op.state, model=model, record=record)
        self._graph = graph
        states = self._states(base)
        self.run.root.await_graph()
        places = {part.var: part.state for part in graph.ops if isinstance(part, ops.Declaring)}
        self._outputs: dict[int, Variable[Any]] = {}
        for number in op.outputs:
            state, value_type = states[places[number]], graph.value_types.get(number, TEXT)
            node = VariableNode(state, base + number, graph.names[number], value_type)
            state.declare(node)
            self._outputs[number] = Variable(node)

    def _states(self, base: int) -> dict[int, StateNode]:
        """The states by their numbers in the graph. Only the root is registered with the link."""
        states = {ROOT: self.run.root}
        num_children: Counter[int] = Counter()
        for part in self._graph.ops:
            if isinstance(part, ops.Fork):
                for child in part.children:
                    number = num_children[part.state]
                    states[child] = states[part.state].branch_of_graph(base + child, number, part.model)
                    num_children[part.state] += 1
        return states

    async def result(self) -> Any:
        """The program's return value in the trace, with the values of its outputs."""
        root = self.run.root
        try:
            await State(root)
            wanted = dict.fromkeys(outputs_in(self._graph.result))
            return filled(self._graph.result, {output: await self._value(output) for output in wanted})
        except BaseException as error:
            root.cancel(f"the wait for its graph ended {left_by(error)}", program_failure(error))
            self.run.record.fail(error)
            raise
        finally:
            self.run.close()

    async def _value(self, output: Output) -> Any:
        variable = self._outputs[output.variable]
        if isinstance(output, GraphOutput):
            return await variable
        return await apply_in_turn(await variable.whole_text(), output.transforms)


def _placed(graph_ops: tuple[ops.Op, ...], objective: ops.Objective | None, group: str) -> tuple[ops.Op, ...]:
    if objective is None or not isinstance(graph_ops[0], ops.Open):
        return graph_ops
    return (msgspec.structs.replace(graph_ops[0], objective=objective, group=group), *graph_ops[1:])


def _traced(graph_ops: tuple[ops.Op, ...], span: RunSpan) -> tuple[ops.Op, ...]:
    """The ops with the run's span as the parent of the server's spans."""
    trace, gens = span.traceparent, ops.Gen | ops.Select | ops.Decide
    traced = [msgspec.structs.replace(op, trace=trace) if isinstance(op, gens) else op for op in graph_ops]
    return tuple(traced)


def _with_files(graph: Graph, files: Mapping[str, MediumExpression]) -> tuple[ops.Op, ...]:
    """The ops with the images and videos of a run in the place of the arguments."""
    given = {graph.media[name].source: shown for name, shown in files.items()}
    found: list[ops.Op] = []
    for op in graph.ops:
        if isinstance(op, ops.Image | ops.Video) and (shown := given.get(op.source)) is not None:
            medium = shown.medium
            op = msgspec.structs.replace(op, source=shown.file.source)
            if isinstance(op, ops.Video) and isinstance(medium, Video) and op.num_frames is None:
                op = msgspec.structs.replace(op, num_frames=medium.num_frames)
        found.append(op)
    return tuple(found)


def _inputs(
    graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[int, str], dict[str, MediumExpression]]:
    """The texts of a graph's arguments by variable, and its images and videos by name."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        [kwargs], args = args, ()
    names = graph.parameters
    if len(args) > len(names) or set(names[: len(args)]) & set(kwargs):
        known = ", ".join(names) or "none"
        raise BadArgument(f"graph {graph.name!r} has the arguments {known}: each is given once")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in values.items():
        if name not in names:
            known = ", ".join(names) or "none"
            raise BadArgument(f"graph {graph.name!r} has no argument {name!r} (it has: {known})", param=name)
        if name in graph.arguments and not isinstance(value, str):
            raise BadArgument(
                f"graph {graph.name!r}: argument {name!r} is text, not {value!r:.200}; give all texts "
                "themselves, or one dict of them",
                param=name,
            )
    missing = [name for name in names if name not in values]
    if missing:
        raise BadArgument(
            f"graph {graph.name!r} needs the arguments {', '.join(map(repr, missing))}", param=missing[0]
        )
    files: dict[str, MediumExpression] = {
        name: video(values[name]) if graph.media[name].kind == "video" else image(values[name])
        for name in names
        if name in graph.media
    }
    MARKERS.reject([shown.file.source for shown in files.values()], f"an image of graph {graph.name!r}")
    return {graph.arguments[name]: values[name] for name in graph.arguments}, files
