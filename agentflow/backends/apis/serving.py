"""Opens the session of a backend behind an API of OpenAI's kind."""

from __future__ import annotations

import base64
import copy
import math
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from agentflow.backends.apis.answers.verification import CHECKED_KINDS, OnUnsupported
from agentflow.backends.apis.capability_table import ModelFacts, embedding_facts, model_facts
from agentflow.backends.apis.chat.flavours import (
    Flavour,
    detect_flavour,
    listed_context,
    listed_fields,
    listed_media,
    lists_embedder,
    shown_context,
)
from agentflow.backends.apis.chat.sampling_fields import KEPT_HERE
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.prices import FREE, NO_COSTS, Billing, Costs
from agentflow.backends.local import interpreted
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    NotAuthorized,
    NotSupported,
    ServerUnreachable,
    UnknownModel,
    listed,
)
from agentflow.protocol.backend import Connection, Deliver
from agentflow.protocol.batches import BatchNotes
from agentflow.protocol.events import Capabilities
from agentflow.protocol.sampling import is_number, is_whole
from agentflow.protocol.wire import API_KEY
from agentflow.runtime.circuit import Circuit
from agentflow.runtime.task_group import open_task_group

if TYPE_CHECKING:  # they import httpx2
    from agentflow.backends.apis.batches.batch_api import BatchApi
    from agentflow.backends.apis.generation.api_format import ApiFormat
    from agentflow.backends.apis.generation.embeddings import ApiEmbedder
    from agentflow.backends.apis.http.transport import ApiTransport


@dataclass(frozen=True)
class ApiSettings:
    """The settings that the backends share. ``server``: its name in messages."""

    url: str = field(repr=False)  # it may have a password
    api_key: str | None = field(repr=False)
    model: str | None
    server: str
    key_source: str = "api_key="
    headers: Mapping[str, str] = field(default_factory=dict)
    on_unsupported: OnUnsupported = "error"
    speculate: bool | None = None
    max_retries: int = 2
    timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    hedge_after_s: float | None = None
    ssl_context: ssl.SSLContext | None = None
    proxy: str | None = field(default=None, repr=False)  # it may have a password
    is_vendors_own: bool = False  # the address is the vendor's
    costs: Costs = NO_COSTS
    embed_model: str | None = None
    error_kind: type[ErrorMapping] = ErrorMapping
    circuit: Circuit = field(default_factory=Circuit)  # sessions of one backend share it
    batch_vendor: Literal["openai", "anthropic", ""] = ""  # whose batch endpoints the server has
    batch_notes: BatchNotes | None = None  # of the map whose requests go into batches

    def errors(
        self, model: str, params: Mapping[str, str] | None = None, max_context: int | None = None
    ) -> ErrorMapping:
        """Makes the errors of requests to ``model``. ``params``, ``max_context``: as in ``ErrorMapping``."""
        return self.error_kind(
            self.server, model, self.key_source, self.api_key, params=params or {}, max_context=max_context
        )

    def billing(
        self, vendor: str, model: str, longest_output: int | None, *, embeds: bool = False
    ) -> Billing:
        """The billing of the model. ``NotSupported`` if the session has a cap and the price is unknown."""
        place = None if self.is_vendors_own else for_display(self.url)
        return self.costs.of_model(vendor, model, place, longest_output, embeds=embeds)

    def check(self, name: str) -> Self:
        """Returns itself, or raises ``BadArgument`` for the class ``name``."""
        checks = (
            (
                "url",
                isinstance(self.url, str) and _is_address(self.url),
                "an address such as http://host:8000/v1, without a query",
            ),
            (
                "model",
                self.model is None or (isinstance(self.model, str) and self.model != ""),
                "the name of a model",
            ),
            (
                "embed_model",
                self.embed_model is None or (isinstance(self.embed_model, str) and self.embed_model != ""),
                "the name of a model",
            ),
            ("on_unsupported", self.on_unsupported in ("error", "retry"), "'error' or 'retry'"),
            ("speculate", self.speculate in (None, True, False), "True, False or None"),
            ("max_retries", is_whole(self.max_retries, 0, 1000), "a whole number, 0 or more"),
            ("timeout_s", is_number(self.timeout_s, 0, 1e9) and self.timeout_s > 0, "a number of seconds"),
            (
                "stall_timeout_s",
                is_number(self.stall_timeout_s, 0, 1e9) and self.stall_timeout_s > 0,
                "a number of seconds",
            ),
            (
                "hedge_after_s",
                self.hedge_after_s is None or is_number(self.hedge_after_s, 0, 1e9),
                "a number of seconds or None",
            ),
            (
                "ssl_context",
                self.ssl_context is None or isinstance(self.ssl_context, ssl.SSLContext),
                "an ssl.SSLContext",
            ),
            ("proxy", self.proxy is None or isinstance(self.proxy, str), "the address of a proxy"),
        )
        for param, is_valid, expected in checks:
            if not is_valid:
                shown = for_display(self.url) if param == "url" else getattr(self, param)
                raise BadArgument(f"{name}: {param} must be {expected}, not {shown!r:.200}", param=param)
        if self.api_key is not None and not (
            isinstance(self.api_key, str) and API_KEY.fullmatch(self.api_key)
        ):
            raise BadArgument(f"{name}: api_key must be printable ASCII, and not empty", param="api_key")
        return self


class ApiBackend:
    """The part that the backends behind an API share: their settings."""

    _settings: ApiSettings

    @property
    def source(self) -> str:
        """The address, the models and the options that change their answers. For the keys of caches."""
        options = {name: value for name, value in vars(self).items() if name not in ("_settings", "_facts")}
        models = (self._settings.model, self._settings.embed_model)
        return repr((type(self).__name__, for_display(self._settings.url), *models, options))

    def with_costs(self, costs: Costs) -> Self:
        """The backend with the prices and the cap of one session. For the session."""
        backend = copy.copy(self)
        backend._settings = replace(self._settings, costs=costs)
        return backend

    def batches(self, notes: BatchNotes) -> Self:
        """The backend for one map, whose requests go into batches. ``NotSupported`` if the server has none.
        For the session."""
        if not self._settings.batch_vendor:
            raise NotSupported(
                f"{self._settings.model or 'the model'} at {self._settings.server} does not run in batches: "
                "leave out batch=True, or use af.OpenAI or af.Anthropic",
                param="batch",
            )
        backend = copy.copy(self)
        backend._settings = replace(self._settings, batch_notes=notes)
        return backend


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_server and not parts.query and not parts.fragment  # requests would not have them
    except ValueError:
        return False


def for_display(url: str) -> str:
    """The address without a user's name and password.

    >>> for_display("http://ann:secret@host:8000/v1/")
    'http://host:8000/v1'
    """
    try:
        parts = urlsplit(str(url))
    except ValueError:
        return "an address that cannot be read"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))


@asynccontextmanager
async def open_transport(settings: ApiSettings, errors: ErrorMapping) -> AsyncIterator[ApiTransport]:
    """Opens the pool of connections. ``errors`` makes the errors of its requests."""
    try:
        from agentflow.backends.apis.http.transport import ApiTransport, open_http
    except ImportError as error:
        raise NotSupported(
            f"models behind an API need the package {error.name!r}: pip install 'agentflow-lm[api]'"
        ) from error
    headers = dict(settings.headers)
    parts = urlsplit(settings.url)
    if settings.api_key is not None:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    elif parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    async with open_http(
        for_display(settings.url), headers, ssl_context=settings.ssl_context, proxy=settings.proxy
    ) as http:
        yield ApiTransport(
            http,
            errors,
            max_retries=settings.max_retries,
            timeout_s=settings.timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            circuit=settings.circuit,
        )


@asynccontextmanager
async def connected(
    settings: ApiSettings,
    flavour: Flavour | None,
    deliver: Deliver,
    facts: ModelFacts | None = None,
    *,
    accepts: Collection[str] = (),
) -> AsyncIterator[Connection]:
    """Opens a connection to a model with the chat API.

    Args:
        settings: The address, the key and the model; without a model, the server is asked for it.
        flavour: The kind of server; None: the server is asked.
        deliver: Receives the events.
        facts: The features of the model; None: the table of models has them.
        accepts: "image" and "video" if the model does, whatever the table and the server report.

    Raises:
        UnknownModel: No model was given, and the server has none, or several.
    """
    model, embed_model = settings.model, settings.embed_model
    context, found = None, None
    if model is None or flavour is None:
        async with open_transport(settings, settings.errors(model or "the model")) as transport:
            found = await _listed(transport, is_needed=model is None)
        model = _only_model(found, settings.server, embed_model) if model is None else model
        flavour = flavour or detect_flavour(found)
        context = listed_context(found, model)
        if context is None and flavour.name == "ollama":
            context = await _ollama_context(settings, model)
    accepts = {*accepts, *listed_media(found, model)}
    known = embedding_facts(flavour.name, model)
    only_embeds = known is not None or model == embed_model or lists_embedder(found, model)
    facts = facts or model_facts(flavour.name, model)
    if context is not None:
        facts = msgspec.structs.replace(facts, context=context)
    if "image" in accepts:
        facts = msgspec.structs.replace(facts, images=True)
    if not facts.chat:
        raise NotSupported(f"{model} is not served by the chat API of {settings.server}", param="model")
    params = {place: name for name, place in flavour.params.items()}
    params["max_completion_tokens"] = "max_tokens"
    async with open_transport(settings, settings.errors(model, params, facts.context)) as transport:
        from agentflow.backends.apis.chat.chat_completions import ChatCompletions
        from agentflow.backends.apis.chat.completions import TextCompletions

        errors = transport.errors
        plain = TextCompletions(model, flavour, facts, errors) if flavour.has_completions else None
        api = ChatCompletions(model, flavour, facts, errors, plain)
        if only_embeds:
            embedder = make_embedder(settings, transport, flavour, embed_model or model)
            features = _embedding_capabilities(model, context or (known.context if known else None))
            async with generating(settings, transport, api, features, FREE, deliver, embedder) as connection:
                yield connection
            return
        other = None if embed_model is None else make_embedder(settings, transport, flavour, embed_model)
        features = flavoured_capabilities(model, flavour, facts, settings.on_unsupported)
        if "video" in accepts:
            features = msgspec.structs.replace(features, videos=True, video_frames=False)
        billing = settings.billing(flavour.name, model, facts.output)
        decisions_api = True if facts.decisions else None if flavour.may_decide else False
        async with generating(
            settings, transport, api, features, billing, deliver, other, decisions_api=decisions_api
        ) as connection:
            yield connection


def make_embedder(
    settings: ApiSettings, transport: ApiTransport, flavour: Flavour, model: str
) -> ApiEmbedder:
    """Makes embeddings with a model on the server of a transport."""
    from agentflow.backends.apis.generation.embeddings import ApiEmbedder

    facts = embedding_facts(flavour.name, model) or flavour.embeddings
    errors = settings.errors(model, max_context=facts.context)
    billing = settings.billing(flavour.name, model, None, embeds=True)
    return ApiEmbedder(transport.sharing(errors), model, facts, billing)


async def _listed(transport: ApiTransport, *, is_needed: bool) -> Any:
    """The list of the server's models; None if it has none and none ``is_needed``."""
    try:
        return await transport.get("models")
    except (ServerUnreachable, NotAuthorized):
        raise
    except AgentflowError:  # many servers have no such list
        if is_needed:
            raise
        return None


async def _ollama_context(settings: ApiSettings, model: str) -> int | None:
    """The context of a model of Ollama, from its own API."""
    root = replace(settings, url=settings.url.rstrip("/").removesuffix("/v1"))
    async with open_transport(root, settings.errors(model)) as transport:
        try:
            return shown_context(await transport.post("api/show", msgspec.json.encode({"model": model})))
        except (ServerUnreachable, NotAuthorized):
            raise
        except AgentflowError:  # a proxy may pass on the API of OpenAI's kind alone
            return None


@asynccontextmanager
async def generating(
    settings: ApiSettings,
    transport: ApiTransport,
    api: ApiFormat,
    features: Capabilities,
    billing: Billing,
    deliver: Deliver,
    embedder: ApiEmbedder | None = None,
    *,
    decisions_api: bool | None = False,
) -> AsyncIterator[Connection]:
    """Opens a connection to a model.

    Args:
        settings: The address, the key and the model.
        transport: Sends the requests.
        api: The format of the requests.
        features: The features of the model.
        billing: Counts its costs.
        deliver: Receives the events.
        embedder: Makes its embeddings.
        decisions_api: Whether the server has OpenAI's decisions API; None: it is tried.
    """
    from agentflow.backends.apis.generation.calls import ApiCalls
    from agentflow.backends.apis.generation.generator import ApiGenerator

    if settings.batch_notes is not None:
        async with _generating_in_batches(
            settings, settings.batch_notes, transport, api, features, billing, deliver
        ) as connection:
            yield connection
        return
    async with open_task_group() as tasks:
        generator = ApiGenerator(
            ApiCalls(transport, api, features, billing=billing, hedge_after_s=settings.hedge_after_s),
            features,
            tasks,
            on_unsupported=settings.on_unsupported,
            speculates=settings.speculate,
            decisions_api=decisions_api,
            embedder=embedder,
        )
        async with interpreted(generator, deliver) as connection:
            yield connection
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _generating_in_batches(
    settings: ApiSettings,
    notes: BatchNotes,
    transport: ApiTransport,
    api: ApiFormat,
    features: Capabilities,
    billing: Billing,
    deliver: Deliver,
) -> AsyncIterator[Connection]:
    """Like ``generating``, for a map whose requests go into batches. Decisions are batched, too."""
    from agentflow.backends.apis.batches.anthropic_batches import AnthropicBatches
    from agentflow.backends.apis.batches.batched_format import BatchedFormat
    from agentflow.backends.apis.batches.batched_generator import BatchedCalls, BatchedGenerator
    from agentflow.backends.apis.batches.collector import Collector
    from agentflow.backends.apis.batches.openai_batches import OpenAIBatches

    kind = OpenAIBatches if settings.batch_vendor == "openai" else AnthropicBatches
    endpoints: BatchApi = kind(transport)
    price = billing.price and billing.price.in_batches()
    collector: Collector | None = None
    try:
        async with open_task_group() as tasks:
            collector = Collector(endpoints, notes, tasks, settings.max_retries)
            calls = BatchedCalls(
                collector,
                transport,
                BatchedFormat(api, endpoints),
                features,
                billing=billing._replace(price=price),
            )
            generator = BatchedGenerator(calls, features, tasks, on_unsupported=settings.on_unsupported)

            def num_calls() -> int:
                return connection.interpreter.num_active() + generator.num_more_calls

            # The concurrency of the map limits the number of states.
            async with interpreted(generator, deliver, max_states=math.inf) as connection:
                tasks.start_soon(collector.run, num_calls)
                yield connection
            tasks.cancel_scope.cancel()
    finally:
        if collector is not None:
            await collector.close()  # after its tasks: one may have learned the id of a new batch


def _only_model(found: Any, server: str, embed_model: str | None) -> str:
    """The only model that is listed besides ``embed_model``, or ``embed_model`` if there is no other."""
    listed_names = listed_fields(found, "id")
    names = [name for name in listed_names if name != embed_model] or listed_names[:1]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownModel(f"{server} lists no models: give model=", param="model")
    raise UnknownModel(f"{server} has several models ({listed(names)}): give one as model=", param="model")


def _embedding_capabilities(model: str, context: int | None) -> Capabilities:
    """The capabilities of a model that generates no text."""
    return Capabilities(
        model,
        select=False,
        logprobs=False,
        seeds=False,
        max_context=context,
        token_ids=False,
        sampling=(),
        continuation=False,
        plain_text=False,
        decisions=False,
        generates=False,
    )


def flavoured_capabilities(
    model: str, flavour: Flavour, facts: ModelFacts, on_unsupported: OnUnsupported
) -> Capabilities:
    """The capabilities of a model on a server of this flavour."""
    is_checked = on_unsupported == "retry"
    enforced = flavour.enforced(facts)
    accepted = (*flavour.accepted(facts), *flavour.accepted(facts, reasons=False))
    sampling = dict.fromkeys((*accepted, *KEPT_HERE))
    if facts.reasoning_off:
        sampling["max_reasoning_tokens"] = None
    return Capabilities(
        model,
        select="choices" in enforced or is_checked,
        logprobs="logprobs" in facts.parameters(reasons=False),
        seeds="seed" in sampling,
        max_context=facts.context,
        constraints=tuple(dict.fromkeys((*enforced, *CHECKED_KINDS))) if is_checked else enforced,
        images=facts.images,
        token_ids=False,
        conversations=True,
        sampling=tuple(sampling),
        default_max_tokens=facts.default_max_tokens,
        continuation=facts.continuation,
        plain_text=flavour.has_completions,
        decisions="choices" in enforced or is_checked or "logprobs" in sampling or facts.decisions,
        reasons=facts.known_to_reason,
    )
