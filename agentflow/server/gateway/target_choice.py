"""Chooses the target of each request.

A request goes to the target with the stored object that it refers to. Otherwise it goes, among the targets
that have its model, to the target with the least cost (``cluster/routing/text_router``), or with the fewest
requests if it has no prompt. The members of a task group that arrive within ``GATHER_S`` are placed together,
as in Algorithm 1 of Parrot (Lin et al., OSDI 2024, section 5.4); later members follow their group.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import anyio

from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.text_router import TextRouter
from agentflow.engine.cache.token_run import TOKEN_BYTES
from agentflow.runtime.circuit import Attempt
from agentflow.server.errors import ApiError
from agentflow.server.gateway.request_facts import RequestFacts
from agentflow.server.gateway.target import Target, logger
from agentflow.server.ollama.request import LATEST

GATHER_S = 0.003
"""How long a task group waits for further members."""
MAX_OWNED = 65_536
"""The limit of stored objects whose target is remembered, and the limit of sessions."""


class Assignment:
    """The assignment of one request to a target, until ``leave``.

    Args:
        target: The target.
        router: The router that chose the target; None: it was chosen for another reason.
        call: The request that the router placed.
    """

    def __init__(
        self, target: Target, router: TextRouter | None = None, call: RoutedRequest | None = None
    ) -> None:
        self.target = target
        self._router = router
        self._call = call
        self._num_output: int | None = None
        target.num_running += 1

    @property
    def num_bytes(self) -> tuple[int, int]:
        """The bytes of the prompt, and the bytes that the target is expected to have cached."""
        call = self._call
        return (0, 0) if call is None else (TOKEN_BYTES * call.num_tokens, TOKEN_BYTES * call.num_hit)

    def started(self) -> None:
        """Records that the first bytes of the answer arrived."""
        if self._router is not None and self._call is not None and not self._call.has_started:
            self._router.started(self._call, time.monotonic())

    def completed(self, num_output: int) -> None:
        """Records that the answer is complete. ``num_output``: its approximate number of tokens."""
        self._num_output = num_output

    def ended(self) -> None:
        """Records that the request has ended."""
        self.target.num_running -= 1
        if self._router is not None and self._call is not None:
            self._router.ended(self._call, self._num_output, time.monotonic())


@dataclass(slots=True)
class _Gathering:
    """Members of a task group that wait to be placed."""

    calls: list[RoutedRequest] = field(default_factory=list)
    is_placed: anyio.Event = field(default_factory=anyio.Event)


class TargetChoice:
    """Chooses a target for each request.

    Args:
        targets: All targets.
        check_s: The interval of health checks, after which a client may try again.
    """

    def __init__(self, targets: Sequence[Target], *, check_s: float = 5.0) -> None:
        self.targets = targets
        self.reasons: Counter[str] = Counter()
        """How often a target was chosen for each reason."""
        self._check_s = check_s
        self._routers: dict[str, TextRouter] = {}
        self._owners: OrderedDict[str, Target] = OrderedDict()
        self._sessions: OrderedDict[str, Target] = OrderedDict()
        """The owners of names that only a server writes. No client can push one out with other names."""
        self._gatherings: dict[tuple[str, str, str], _Gathering] = {}
        self._numbers = itertools.count()

    # Stored objects

    def own(self, name: str, target: Target, *, is_sure: bool = True) -> None:
        """Records that the target has the stored object with this name. ``is_sure``: False if a client may
        have written the name. Then a known owner is kept, so that no client redirects others' requests; the
        names of sessions are sure."""
        if not is_sure and self.owner((name,)) is not None:
            return
        owners = self._sessions if is_sure else self._owners
        owners[name] = target
        owners.move_to_end(name)
        if len(owners) > MAX_OWNED:
            owners.popitem(last=False)

    def owner(self, names: Sequence[str]) -> Target | None:
        """The target that has one of these objects, if it is known."""
        for name in names:
            for owners in (self._sessions, self._owners):
                if (found := owners.get(name)) is not None:
                    owners.move_to_end(name)
                    return found
        return None

    # Health

    def failed(self, target: Target, attempt: Attempt, why: str, *, is_gone: bool = False) -> None:
        """Records that a request to the target failed. If that opens its circuit, its cache is assumed lost.
        ``is_gone``: nothing listens there, so the first failure opens the circuit."""
        was_closed = target.circuit.status == "closed"
        target.is_gone = is_gone
        attempt.failed(0.0 if is_gone else None)
        if was_closed and target.circuit.status == "open":
            self.lost(target, why)

    def lost(self, target: Target, why: str) -> None:
        """Records that the target does not answer."""
        logger.warning("%s gets no requests until it answers again: %s", target.base, why)
        target.why_down = why
        for router in self._routers.values():
            router.forget(target.number)

    def back(self, target: Target) -> None:
        """Records that the target answers again."""
        logger.warning("%s answers again", target.base)
        for router in self._routers.values():
            router.forget(target.number, target.cache_tokens)

    # Choices

    def resolve(self, model: str) -> str:
        """The name under which requests for a model are placed. A name with ``LATEST`` and the name without
        it are one model, unless a target lists both: its adapter can be called ``latest``."""
        base = model.removesuffix(LATEST)
        names = {base, f"{base}{LATEST}"}
        has_both = any(names <= target.models for target in self.targets if target.models is not None)
        return model if has_both else base

    def candidates(self, asked: RequestFacts, barred: Collection[Target] = ()) -> list[Target]:
        """The targets that can get the request now. Targets that asked for a pause are included only if there
        are no others."""
        up = [target for target in self.targets if target.is_up and target not in barred]
        if asked.model:
            having = [target for target in up if target.has_model(asked.model)]
            is_known = any(target.has_model(asked.model) for target in self.targets)
            up = having if is_known else up  # a target answers with its error for an unknown model
        return [target for target in up if not target.is_busy(asked.model)] or up

    async def place(self, asked: RequestFacts, barred: Collection[Target] = ()) -> Assignment:
        """Assigns a request to a target. ``ApiError`` if no target can get it.

        Args:
            asked: The request.
            barred: Targets that it must not go to.
        """
        owner = self.owner(asked.names)
        if owner is not None and owner.circuit.is_ready and owner not in barred:  # also while it drains
            self.reasons["owner"] += 1
            return Assignment(owner)
        candidates = self.candidates(asked, barred)
        if not candidates:
            raise self._none_left(asked)
        if asked.run is None:
            self.reasons["fewest_requests"] += 1
            return Assignment(min(candidates, key=lambda target: target.num_running + target.num_websockets))
        self.reasons["cost"] += 1
        router = self._router(asked.model)
        call = self._call(asked, candidates)
        if call.task_group is None or barred:
            router.place([call], time.monotonic())
        else:
            await self._gather(router, asked, call)
        return Assignment(self.targets[call.replica], router, call)

    def _none_left(self, asked: RequestFacts) -> ApiError:
        if asked.model and any(target.has_model(asked.model) for target in self.targets):
            text = f"no server with the model {asked.model!r:.200} answers now: try again in a moment"
        else:
            text = "no server answers now: try again in a moment"
        return ApiError(503, "no_target", text, retry_after_s=self._check_s)

    def _router(self, model: str) -> TextRouter:
        """The router of a model. Models that no target lists share one: clients must not create routers.
        Routers of models that have left all targets are forgotten."""
        name = model if self._is_listed(model) else ""
        router = self._routers.get(name)
        if router is None:
            self._routers = {
                known: one for known, one in self._routers.items() if not known or self._is_listed(known)
            }
            sizes = {target.number: target.cache_tokens for target in self.targets}
            router = self._routers[name] = TextRouter(sizes)
        return router

    def _is_listed(self, model: str) -> bool:
        return any(target.lists_model(model) for target in self.targets)

    def _call(self, asked: RequestFacts, candidates: Sequence[Target]) -> RoutedRequest:
        caller, program = asked.caller, asked.program
        assert asked.run is not None
        return RoutedRequest(
            next(self._numbers),
            (asked.model, asked.cache_salt),
            asked.run,
            output_tokens=caller.output_tokens or 0,
            objective=asked.objective,
            task_group=f"{program}\0{caller.group}" if caller.group else None,
            program=program or None,
            barred=[target.number for target in self.targets if target not in candidates],
        )

    async def _gather(self, router: TextRouter, asked: RequestFacts, call: RoutedRequest) -> None:
        key = asked.model, asked.program, asked.caller.group
        gathering = self._gatherings.get(key)
        if gathering is not None:
            gathering.calls.append(call)
            try:
                await gathering.is_placed.wait()
            except BaseException:
                self._give_up(router, gathering, call)
                raise
            if call.replica < 0:
                raise ApiError(503, "no_target", "this task group was not placed: try again in a moment")
            return
        gathering = self._gatherings[key] = _Gathering([call])
        try:
            await anyio.sleep(GATHER_S)  # noqa: TID251  (a bound, within which the rest of the group comes)
        except BaseException:
            gathering.calls.remove(call)
            raise
        finally:
            del self._gatherings[key]
            barred = gathering.calls[0].barred if gathering.calls else ()
            for one in gathering.calls:
                one.barred = barred
            try:
                if gathering.calls:
                    router.place(gathering.calls, time.monotonic())
            finally:
                gathering.is_placed.set()

    def _give_up(self, router: TextRouter, gathering: _Gathering, call: RoutedRequest) -> None:
        """Removes a waiting member whose client is gone."""
        if not gathering.is_placed.is_set():
            gathering.calls.remove(call)
        elif call.replica >= 0:
            router.ended(call, None, time.monotonic())
