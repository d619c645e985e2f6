"""``gen``, ``reply`` and ``select``: text that the model generates or chooses, and the parameters of
sampling."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

from agentflow.errors import BadArgument, error_param
from agentflow.language.expressions import Expression, Offer, checked_conversation, make_tuple, offer
from agentflow.language.markers import MARKERS
from agentflow.language.typed.finite import finite_texts
from agentflow.language.typed.replies import Reply, reader_of_replies
from agentflow.language.typed.tags import Tag, Tagged, tagged_type
from agentflow.language.typed.tools import DescribedTool, Tool, described_tool
from agentflow.language.typed.values import TEXT, ValueType, refuse_several, value_type
from agentflow.protocol.chat import ToolChoice, ToolSpec
from agentflow.protocol.constraint import Whitespace
from agentflow.protocol.ops import SelectMethod, check_choices
from agentflow.protocol.sampling import GenParams, is_whole

if TYPE_CHECKING:  # of every type, such as ``Report | None``, which type[...] does not include
    from typing_extensions import TypeForm

ValueT = TypeVar("ValueT")
ItemT = TypeVar("ItemT")
ValueT_co = TypeVar("ValueT_co", covariant=True)

OnInvalid = Literal["raise", "retry", "reask"]
MOST_RETRIES: Final = 20


class GenExpression(Expression, Generic[ValueT_co]):
    """A generation into a variable. ``s[expression]`` is that variable, with its type.

    Args:
        name: The variable's name.
        params: The sampling parameters.
        value_type: How the text becomes a value.
        max_retries: How often an invalid value is generated again.
        offer: The tools of a reply; None for one that may call the tools of the reply before it.
        asks_again: An invalid value is generated again after a turn that explains the fault.
        texts: The texts to choose from, if they are scored.
    """

    __slots__ = ("asks_again", "max_retries", "name", "offer", "params", "texts", "value_type")

    def __init__(
        self,
        name: str,
        params: GenParams,
        value_type: ValueType,
        max_retries: int = 0,
        offer: Offer | None = None,
        *,
        asks_again: bool = False,
        texts: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.texts = texts
        self.params = params
        self.value_type = value_type
        self.max_retries = max_retries
        self.asks_again = asks_again
        self.offer = offer


class SelectExpression(Expression):
    """A choice into variable ``name``."""

    __slots__ = ("choices", "method", "name")

    def __init__(self, name: str, choices: tuple[str, ...], method: SelectMethod) -> None:
        self.name = name
        self.choices = choices
        self.method: SelectMethod = method


class SamplingOptions(TypedDict, total=False):
    """The options of ``gen`` that do not affect the type of its value."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: bool
    min_tokens: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_regex: str | None
    top_logprobs: int
    max_reasoning_tokens: int | None
    stream_reasoning: bool
    jump_forward: bool


class JsonOptions(SamplingOptions, total=False):
    """The options of a ``reply``, whose constraint may be JSON."""

    whitespace: Whitespace


class ValueOptions(SamplingOptions, total=False):
    """The options of a ``gen`` whose value may be invalid."""

    on_invalid: OnInvalid
    max_retries: int
    scored: bool


class JsonValueOptions(ValueOptions, JsonOptions, total=False):
    """The options of a ``gen`` whose text is JSON."""


@overload
def gen(name: str, *, schema: type[ValueT], **options: Unpack[JsonValueOptions]) -> GenExpression[ValueT]: ...
@overload
def gen(
    name: str, *, schema: TypeForm[ValueT], **options: Unpack[JsonValueOptions]
) -> GenExpression[ValueT]: ...
@overload
def gen(name: str, *, schema: Any, **options: Unpack[JsonValueOptions]) -> GenExpression[Any]: ...
@overload
def gen(name: str, *, type: type[ValueT], **options: Unpack[ValueOptions]) -> GenExpression[ValueT]: ...
@overload
def gen(
    name: str, *, tags: Sequence[Tag], **options: Unpack[JsonValueOptions]
) -> GenExpression[list[str | Tagged]]: ...
@overload
def gen(
    name: str,
    *,
    regex: str | None = None,
    grammar: str | None = None,
    **options: Unpack[ValueOptions],
) -> GenExpression[str]: ...


def gen(
    name: str,
    *,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_regex: str | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    max_reasoning_tokens: int | None = None,
    stream_reasoning: bool = False,
    regex: str | None = None,
    schema: Any = None,
    type: Any = None,
    grammar: str | None = None,
    tags: Sequence[Tag] | None = None,
    whitespace: Whitespace = "compact",
    jump_forward: bool = True,
    on_invalid: OnInvalid = "raise",
    max_retries: int = 2,
    scored: bool = False,
) -> GenExpression[Any]:
    """Text that the model generates, as variable ``name``.

    A gen of a conversation is in an assistant's turn. Right after another turn, it begins a new one:
    ``s += af.user("Why?") + af.gen("answer")``. Without turns, as for base models, it continues the text. The
    text before a gen should not end in a space: in most models, tokens of words begin with the space.

    At most one of ``regex``, ``schema``, ``type``, ``grammar`` and ``tags`` constrains the text and
    determines its value; without one, the text is the value. ``select`` chooses one of several texts, and
    ``reply`` offers tools; ``s.limit`` has the time limit of a state. A value is invalid if
    ``max_tokens`` truncated it, or if it violates a rule that a grammar cannot enforce, such as a validator
    written in Python. Awaiting an invalid value raises ``InvalidValue``.

    A sampling parameter that is None is left to the model: the engine takes the default that is given below
    in brackets, and a model behind an API its own.

    Args:
        name: The name of the variable.
        max_tokens: The maximum number of tokens [256].
        min_tokens: The minimum number of tokens [0].
        temperature: 0 is greedy [0]. ``SamplingParams`` defines the order in which the sampling options
            apply.
        top_p: Samples only from the most likely tokens, up to this probability [1.0: off].
        top_k: Samples only from this many of the most likely tokens [0: off].
        min_p: Samples only from tokens with at least this fraction of the greatest probability [0.0: off].
        frequency_penalty: -2 to 2; lowers the logits of generated tokens with each occurrence [0.0: off].
        presence_penalty: -2 to 2; lowers the logits of generated tokens once [0.0: off].
        repetition_penalty: Reduces the logits of generated tokens and of tokens in the prompt [1.0: off].
        logit_bias: Maps token ids to numbers that are added to their logits, -100 to 100.
        seed: None derives one from the session's seed.
        stop: One string or several. The text ends before the first of them.
        stop_regex: A regular expression. The text ends before its first match.
        stop_token_ids: The text ends at one of these tokens.
        ignore_eos: The model's end token does not end the text.
        logprobs: The variable gets ``logprobs``.
        top_logprobs: 0 to 20; the variable also gets this many of the most likely tokens at each position.
        max_reasoning_tokens: The maximum number of tokens that a reasoning model spends on reasoning before
            the text; they count towards ``max_tokens`` too. 0: no reasoning. None: no limit, but no reasoning
            before a constrained text. Other models ignore it.
        stream_reasoning: ``s[name].reasoning_deltas()`` yields the reasoning while it is generated.
        regex: A regular expression that all of the text matches.
        schema: A type that pydantic or msgspec can express as JSON, such as a model, ``list[Report]`` or
            ``Annotated[int, Field(ge=1)]``, or a JSON schema as a dict.
        type: ``int``, ``float`` or ``bool``.
        grammar: A grammar in Lark's notation.
        tags: The text is free except in these places; the value is a list of strings and ``af.Tagged``.
        whitespace: Between the parts of JSON: ``"compact"`` (one line, with ``, `` and ``: ``), ``"tight"``
            (none) or ``"free"`` (the model's choice).
        jump_forward: Appends text that the constraint forces without sampling it, which is faster.
        on_invalid: ``"retry"`` generates an invalid value again, with another seed, and a greedy gen at
            temperature 0.7. ``"reask"`` first tells the model about the fault, in a turn after the invalid
            text. In both cases the state contains only the valid text. It waits for this text, and fails if
            there is none. The variable gets no text before it is valid, and its ``usage`` counts all
            attempts. A trace cannot contain such a gen.
        max_retries: The maximum number of attempts after the first.
        scored: The text is the likeliest of all texts that ``regex``, ``schema`` or ``type`` allows, at most
            1,000, as in ``select`` with the method ``likelihood``. Otherwise it is written token by token,
            and a likely token may begin an unlikely text. Options of sampling do not apply.

    Raises:
        BadArgument: An argument is invalid; ``param`` is its name.
        NotSupported: On appending, if the backend does not have an option.

    >>> s += af.user("What do plants do?")
    >>> s += af.assistant(af.gen("answer", max_tokens=32, stop="\\n"))
    >>> await s["answer"]
    'Plants turn light into sugar.'
    >>> report = af.gen("report", schema=Report)
    >>> s += af.user("Write a report.") + af.assistant(report)
    >>> await s[report]  # s["report"] is the same variable; this one's type is known
    Report(summary='Clear and well argued.', score=8)
    >>> legs = af.gen("legs", type=int)
    >>> s += af.user("How many legs has a spider?") + af.assistant(legs)
    >>> await s[legs]
    8
    >>> s += af.assistant(af.gen("idea", temperature=1.0, min_tokens=8, presence_penalty=0.5))
    """
    check_variable_name(name, "gen")
    num_retries = checked_retries("gen", on_invalid, max_retries, get_args(OnInvalid))
    params = GenParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_bias_pairs(logit_bias),
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else _tuple(stop, "stop", "strings"),
        stop_regex=stop_regex,
        stop_token_ids=_tuple(stop_token_ids, "stop_token_ids", "token ids"),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        max_reasoning_tokens=max_reasoning_tokens,
        stream_reasoning=stream_reasoning,
    )
    wanted = _find_type({"regex": regex, "schema": schema, "type": type, "grammar": grammar, "tags": tags})
    if whitespace != "compact" or jump_forward is not True:
        wanted = wanted.decoded(whitespace, jump_forward)
    if scored:
        if params != GenParams() or num_retries:
            raise BadArgument(
                "gen: scored=True takes no option of sampling: the text is not sampled", param="scored"
            )
        texts = finite_texts(wanted.constraint)
        check_choices(name, texts)
        return GenExpression(name, params, wanted, texts=texts)
    if num_retries and wanted.constraint is None:
        raise BadArgument(
            "gen: on_invalid applies to a value: give a schema, for example", param="on_invalid"
        )
    return GenExpression(name, params.check(), wanted, num_retries, asks_again=on_invalid == "reask")


def checked_retries(where: str, on_invalid: str, max_retries: int, known: Sequence[str]) -> int:
    """How often an invalid value is generated again. ``known``: the accepted values of ``on_invalid``.
    ``BadArgument``."""
    if on_invalid not in known:
        accepted = " or ".join([f'"{one}"' for one in known])
        raise BadArgument(f"{where}: on_invalid must be {accepted}, not {on_invalid!r}", param="on_invalid")
    if on_invalid == "raise":
        return 0
    if not is_whole(max_retries, 1, MOST_RETRIES):
        raise BadArgument(
            f"{where}: max_retries must be 1 to {MOST_RETRIES}, not {max_retries!r}", param="max_retries"
        )
    return max_retries


_GEN_OPTIONS = frozenset(inspect.signature(gen).parameters)


def check_variable_name(name: str, what: str) -> None:
    """``BadArgument`` if ``name`` is not a name for the variable of ``what``."""
    if not isinstance(name, str) or not name:
        raise BadArgument(
            f'{what} needs a name for its variable, such as "answer", not {name!r}', param="name"
        )
    if not name.isidentifier():  # a marker has brackets
        MARKERS.reject([name], f"{what}: its name", "name")


def _find_type(kinds: Mapping[str, Any]) -> ValueType:
    given = {name: value for name, value in kinds.items() if value is not None}
    if not given:
        return TEXT
    if "tags" not in given:
        return value_type(**given)
    refuse_several(given)
    return tagged_type(given["tags"])


def _tuple(values: Sequence[ItemT], param: str, wanted: str) -> tuple[ItemT, ...]:
    return values if isinstance(values, tuple) else make_tuple(values, "gen", param, wanted)


def _bias_pairs(biases: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    if not isinstance(biases, Mapping):
        raise BadArgument(
            f"gen: logit_bias must be a dict of token id to number, not {biases!r}", param="logit_bias"
        )
    pairs = tuple(biases.items())
    # Sorted, so that equal biases are equal parameters. The check rejects keys that are not token ids.
    return tuple(sorted(pairs)) if all(isinstance(token, int) for token in biases) else pairs


def reply(
    name: str,
    *,
    tools: Sequence[Tool | ToolSpec] | None = None,
    choice: str | ToolChoice = "auto",
    parallel: bool = True,
    regex: str | None = None,
    schema: Any = None,
    grammar: str | None = None,
    **options: Unpack[JsonOptions],
) -> GenExpression[Reply]:
    """The assistant's reply, as variable ``name``: prose, and tool calls in the model's own notation.

    A reply is a whole turn: it ends the assistant's turn that a conversation began, and outside a turn it
    begins and ends one. In a turn that the program opened itself, the program ends it.

    The text of the variable is the prose: iterating yields it, and f-strings, transforms, ``join`` and other
    states use it. ``s["answer"].partials()`` yields ``Reply`` objects with the calls, each longer than the
    one before. In ``s.messages()`` the calls are the ``tool_calls`` of the turn. A reply that ``max_tokens``
    truncated is a value too; its last call may be incomplete.

    Args:
        name: The name of the variable.
        tools: Functions with annotated parameters, or schemas, that the model may call. The chat template
            describes them to the model. None: the tools of the reply before. The calls have the functions,
            and arguments of the parameters' types; ``af.act`` runs them.
        choice: Whether the reply calls tools: ``"auto"``, ``"required"``, ``"none"``, or the name of the tool
            that it must call.
        parallel: Whether it may call several tools.
        regex: Constrains a reply that calls no tool, as in ``gen``. The reply is then either calls alone, or
            such a text.
        schema: As ``regex``.
        grammar: As ``regex``.
        options: The other options of ``gen``.

    >>> async with flow.state() as s:
    ...     s += af.user("What is the weather in Oslo?")
    ...     answer = af.reply("answer", tools=[weather])
    ...     s += answer
    ...     async for reply in s[answer].partials():
    ...         print(reply.text, reply.tool_calls)
    ...     reply = await s[answer]
    """
    check_variable_name(name, "reply")
    arguments: dict[str, Any] = {
        "regex": regex,
        "schema": schema,
        "grammar": grammar,
        **options,
    }
    check_reply_options("reply", options)
    generation = gen(name, **arguments)
    with error_param("tools"):
        given = [
            tool if isinstance(tool, ToolSpec) else described_tool(tool)
            for tool in make_tuple(tools or (), "reply", "tools", "functions or schemas")
        ]
    read = reader_of_replies([tool for tool in given if isinstance(tool, DescribedTool)])
    kind = replace(generation.value_type, shown="reply", read=read, comes_in_parts=False, is_reply=True)
    offered = None
    if tools is not None or choice != "auto" or not parallel:
        specs = [tool.spec if isinstance(tool, DescribedTool) else tool for tool in given]
        offered = offer(specs, choice, parallel=parallel, where="reply")
        checked_conversation((), offered)
    return GenExpression(name, generation.params, kind, offer=offered)


def check_reply_options(where: str, options: Mapping[str, object]) -> None:
    """``BadArgument`` for an option of ``gen`` that a reply does not have, ``TypeError`` for an unknown one,
    which ``gen`` would report as its own."""
    for option in options:
        if option in ("on_invalid", "max_retries", "scored"):
            raise BadArgument(
                f"{where}: {option} is for gen: catch InvalidValue, and continue the state", param=option
            )
        if option not in _GEN_OPTIONS:
            raise TypeError(f"{where}() got an unexpected keyword argument {option!r}")


def select(
    name: str, choices: Sequence[str], *, method: SelectMethod = "token_length_normalized"
) -> SelectExpression:
    """The most likely of ``choices``, as variable ``name``.

    Each choice is encoded together with the text before it, and scored from the first token in which the
    choices differ. So it does not matter whether a space or a common beginning is at the end of the prompt or
    in the choices. ``s["verdict"].choices`` has the scores; the choice with the highest is selected.

    Args:
        name: The name of the variable.
        choices: The texts to choose from.
        method: The score of a choice. ``"token_length_normalized"``: the mean log-probability of its tokens.
            ``"likelihood"``: the log-probability of the whole choice; if another choice begins with it,
            including the end of the turn. ``"greedy_token_selection"``: the number of its tokens that agree
            with greedy decoding. ``"unconditional_likelihood_normalized"``: the mean log-probability, minus
            the same without the prompt, so that a common text has no advantage.

    Raises:
        BadArgument: The choices or the method are invalid.

    >>> s += af.user("Is it about science?")
    >>> s += af.assistant(af.select("verdict", ["yes", "no"]))
    >>> await s["verdict"]
    'yes'
    """
    check_variable_name(name, "select")
    where = f"select({name!r})"
    texts = make_tuple(choices, where, "choices", "strings")
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in texts):
        raise BadArgument(f"{where}: choices must be a list of strings, not {choices!r}", param="choices")
    check_choices(name, texts)
    if method not in get_args(SelectMethod):
        known = ", ".join(get_args(SelectMethod))
        raise BadArgument(f"{where}: there is no method {method!r} (there are: {known})", param="method")
    return SelectExpression(name, texts, method)
