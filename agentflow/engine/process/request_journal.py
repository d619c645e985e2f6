"""The unfinished requests of an engine process: their progress, and which of them may crash it.

When the process dies, the next process gets all of them in the order of submission, with the ids that were
already generated. A request that always crashes the process must neither do so forever nor fail other
requests. A request that was running at two deaths and made no progress between them is a *suspect*. A single
suspect is blamed, and only it fails. Several suspects run alone, one after another, while the other requests
wait: a suspect that makes progress is cleared, and a suspect whose trial crashes the process is blamed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from agentflow.engine.constrained.jump_forward import mark_forced
from agentflow.engine.messages import Failed, Finished, FromEngine, Progress, Started, UpdateHint
from agentflow.engine.request import Submit, TopTokens
from agentflow.errors import Cancelled, EngineDown, EngineFailed

# A request becomes a suspect after this many deaths without progress between them.
SUSPECT_DEATHS = 2
# A request fails after this many deaths in total. Otherwise two requests that crash the process only
# together, and make a little progress alone, would run forever.
MAX_DEATHS = 10


@dataclass(slots=True, eq=False)
class Unfinished:
    """A request and its output so far. It may move to another journal, whose engine then continues it."""

    submit: Submit
    added_s: float  # on the journal's clock
    ids: list[int] = field(default_factory=list)  # the output so far, up to ``texts``
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_redrawn: int = 0  # as in ``Submit``
    ttft_set_s: float | None = None  # when ``update_hint`` changed its ``ttft_s``; None: it did not
    is_running: bool = False
    is_aborted: bool = False
    deaths: int = 0
    deaths_since_progress: int = 0

    @property
    def ttft_from_s(self) -> float:
        """The time from which ``ttft_s`` counts."""
        return self.added_s if self.ttft_set_s is None else self.ttft_set_s

    @property
    def is_suspect(self) -> bool:
        return self.deaths_since_progress >= SUSPECT_DEATHS

    def drop(self, num_tokens: int) -> None:
        """Drops the last ``num_tokens`` ids. Some of the remaining ids may not have log-probabilities yet."""
        del self.ids[-num_tokens:]
        del self.logprobs[len(self.ids) :], self.top_logprobs[len(self.ids) :]
        self.num_redrawn += 1

    def update_hint(self, update: UpdateHint, now_s: float) -> None:
        """Updates the request with the new hint of its state."""
        if update.ttft_s != self.submit.origin.ttft_s:
            self.ttft_set_s = now_s
        self.submit = msgspec.structs.replace(self.submit, origin=update.apply_to(self.submit.origin))

    def as_submitted(self, now_s: float) -> Submit:
        """Returns the request that continues this one in a new engine, with its remaining time."""
        submit = _later(self.submit, now_s - self.added_s, now_s - self.ttft_from_s)
        if not (self.ids or self.texts or self.num_redrawn):
            return submit
        self.texts = ["".join(self.texts)]
        return msgspec.structs.replace(
            submit,
            generated_ids=[*self.ids],
            generated_logprobs=[*self.logprobs],
            generated_top_logprobs=[*self.top_logprobs],
            generated_forced=[*self.forced],
            generated_text=self.texts[0],
            num_redrawn=self.num_redrawn,
        )


class StateIndex:
    """Unfinished requests by state. A session has thousands, of which a new hint affects few."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[int, Unfinished]] = {}

    def add(self, entry: Unfinished) -> None:
        """Adds a request."""
        submit = entry.submit
        self._entries.setdefault(submit.origin.state, {})[submit.request_id] = entry

    def remove(self, entry: Unfinished) -> None:
        """Removes a request that was added."""
        entries = self._entries[entry.submit.origin.state]
        del entries[entry.submit.request_id]
        if not entries:
            del self._entries[entry.submit.origin.state]

    def update_hint(self, update: UpdateHint, now_s: float) -> None:
        """Updates the requests of a state with its new hint."""
        for entry in self._entries.get(update.state, {}).values():
            entry.update_hint(update, now_s)


class RequestJournal:
    """Tracks unfinished requests; does no I/O. A request is *queued* until ``take_ready`` returns it, and
    then *sent* until it ends or the process dies. ``clock``: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queued: dict[int, Unfinished] = {}
        self._sent: dict[int, Unfinished] = {}
        self._reset()
        self._missing: set[str] = set()  # adapters that the process does not have yet
        self.media: set[str] = set()
        """The images that the process has. ``medium_sent`` adds one."""

    def _reset(self) -> None:
        """No request is queued or sent."""
        self._of_state = StateIndex()  # queued and sent requests
        self._num_suspects = 0
        self._num_of_adapter: Counter[str] = Counter()  # requests, by the identity of their adapter
        # Requests that may be ready, and some that were sent meanwhile. Other queued requests wait for an
        # adapter or an image.
        self._candidates: dict[int, Unfinished] = {}
        self._of_medium: dict[str, dict[int, Unfinished]] = {}  # some that wait for it, by its identity

    def __len__(self) -> int:
        return len(self._queued) + len(self._sent)

    @property
    def is_owed(self) -> bool:
        """Whether the process has unfinished requests."""
        return bool(self._sent)

    def add(self, submit: Submit) -> None:
        """Queues a new request."""
        self.adopt(Unfinished(submit, self._clock()))

    def adopt(self, entry: Unfinished) -> None:
        """Queues a request that may have run in another process."""
        self._queued[entry.submit.request_id] = self._candidates[entry.submit.request_id] = entry
        self._of_state.add(entry)
        self._num_suspects += entry.is_suspect
        self._num_of_adapter[entry.submit.adapter] += 1

    def give_up(self, *, suspects: bool = False, adapter: str | None = None) -> list[Unfinished]:
        """Drops and returns the queued requests; suspects only if ``suspects``. ``adapter``: only those that
        use the adapter with this identity."""
        given = [
            entry
            for entry in self._queued.values()
            if (suspects or not entry.is_suspect) and adapter in (None, entry.submit.adapter)
        ]
        if len(given) == len(self):
            self._queued = {}
            self._reset()
        else:
            for entry in given:
                self._remove(self._queued, entry.submit.request_id)
        return given

    @property
    def has_suspects(self) -> bool:
        """Whether a request is on trial or waits for its trial."""
        return self._num_suspects > 0

    def needs(self, adapter: str) -> bool:
        """Whether an unfinished request uses the adapter with this identity."""
        return self._num_of_adapter[adapter] > 0

    def wait_for(self, adapters: Iterable[str]) -> None:
        """Holds back requests that use the adapters with these identities, which a new process is loading."""
        self._missing |= set(adapters)

    def adapter_loaded(self, adapter: str) -> None:
        """Releases the requests that wait for the adapter with this identity."""
        self._missing.discard(adapter)
        self._candidates |= {
            number: entry for number, entry in self._queued.items() if entry.submit.adapter == adapter
        }

    def adapter_gone(self, adapter: str) -> list[Failed]:
        """Drops the requests that use an adapter that cannot be loaded. Returns their answers."""
        self._missing.discard(adapter)
        waiting = [entry for entry in self._queued.values() if entry.submit.adapter == adapter]
        for entry in waiting:
            self._remove(self._queued, entry.submit.request_id)
        return [without_adapter(entry) for entry in waiting]

    def take_ready(self) -> list[Submit]:
        """Returns the requests to send to the process now. Their adapters and images must be in the
        process."""
        released = self._next()
        if not self._num_suspects:
            self._candidates.clear()
        if self._missing:
            released = [entry for entry in released if entry.submit.adapter not in self._missing]
        released = [entry for entry in released if self._has_media(entry)]
        for entry in released:
            del self._queued[entry.submit.request_id]
            self._sent[entry.submit.request_id] = entry
        now_s = self._clock()
        return [entry.as_submitted(now_s) for entry in released]

    def _next(self) -> list[Unfinished]:
        """The queued requests that may be sent now, if the process has what they need."""
        if not self._num_suspects:
            return [self._queued[number] for number in self._candidates if number in self._queued]
        if any(entry.is_suspect for entry in self._sent.values()):
            return []  # a trial is running
        return [next(entry for entry in self._queued.values() if entry.is_suspect)]

    def _has_media(self, entry: Unfinished) -> bool:
        """Whether the process has the images of the request. If not, it waits for one of them."""
        for run in entry.submit.media:
            if run.identity not in self.media:
                self._of_medium.setdefault(run.identity, {})[entry.submit.request_id] = entry
                return False
        return True

    def missing_media(self) -> set[str]:
        """Returns the images that the process does not have, of the requests that ``take_ready`` looks at
        next."""
        return {run.identity for entry in self._next() for run in entry.submit.media} - self.media

    def medium_sent(self, identity: str) -> None:
        """The process has an image: releases the requests that wait for it."""
        self.media.add(identity)
        self._candidates |= self._of_medium.pop(identity, {})

    def update_hint(self, update: UpdateHint) -> None:
        """Updates the unfinished requests of a state with its new hint, which also applies in another
        process."""
        self._of_state.update_hint(update, self._clock())

    def drop(self, request_id: int) -> None:
        """Forgets a request that cannot be sent."""
        self._remove(self._sent, request_id)

    def resubmit(self, request_id: int) -> Submit | None:
        """Returns a request to send to the process again. Returns None if it has ended or was aborted, and
        then drops it."""
        entry = self._sent.get(request_id)
        if entry is None:
            return None
        if entry.is_aborted:
            self._remove(self._sent, request_id)
            return None
        return entry.as_submitted(self._clock())

    def abort(self, request_id: int) -> bool:
        """Drops a queued request, or marks a sent one as aborted. Returns whether to forward the abort to the
        process."""
        entry = self._sent.get(request_id)
        if entry is not None:
            entry.is_aborted = True
        elif request_id in self._queued:
            self._remove(self._queued, request_id)
        return entry is not None

    def receive(self, message: FromEngine) -> None:
        """Updates the journal with a message from the process."""
        match message:
            case Started():
                for request_id in message.request_ids:
                    if request_id in self._sent:
                        self._sent[request_id].is_running = True
            case Progress():
                entry = self._sent.get(message.request_id)
                if entry is not None:
                    if message.num_dropped:
                        entry.drop(message.num_dropped)
                    entry.ids += message.token_ids
                    if message.text:
                        entry.texts.append(message.text)
                    entry.logprobs += message.logprobs
                    entry.top_logprobs += message.top_logprobs
                    if message.forced is not None:
                        mark_forced(entry.forced, message.forced)
                    if entry.deaths_since_progress:
                        self._num_suspects -= entry.is_suspect
                        entry.deaths_since_progress = 0
            case Finished() | Failed():
                self._remove(self._sent, message.request_id)

    def process_replaced(self) -> list[Failed]:
        """Queues all requests again after the process ended without a fault. Returns the answers of requests
        that end now."""
        ended = [aborted(entry.submit.request_id) for entry in self._sent.values() if entry.is_aborted]
        self._queued = dict(sorted((self._queued | self._sent).items()))  # ids grow with each submission
        self._sent = {}
        self._candidates, self._of_medium = self._queued.copy(), {}
        self._missing.clear()
        for failed in ended:
            self._remove(self._queued, failed.request_id)
        for entry in self._queued.values():
            entry.is_running = False
        return ended

    def process_died(self) -> tuple[list[Failed], bool]:
        """Queues all requests again after the process died. Returns the answers of requests that end now, and
        whether a single suspect is blamed."""
        running = [entry for entry in self._sent.values() if entry.is_running and not entry.is_aborted]
        ended = self.process_replaced()
        for entry in running:
            entry.deaths += 1
            entry.deaths_since_progress += 1
        suspects = [entry for entry in running if entry.is_suspect]
        blamed = suspects if len(suspects) == 1 else []
        exhausted = [entry for entry in running if entry.deaths >= MAX_DEATHS and entry not in blamed]
        blamed_ends = [_blame(entry) for entry in blamed + exhausted]
        for failed in blamed_ends:
            self._remove(self._queued, failed.request_id)
        self._num_suspects = sum(entry.is_suspect for entry in self._queued.values())
        return ended + blamed_ends, bool(blamed)

    def fail_all(self, why: str) -> list[Failed]:
        """Fails and drops all requests."""
        ended = [Failed(request_id, EngineDown.code, why) for request_id in sorted(self._queued | self._sent)]
        self._queued, self._sent = {}, {}
        self._reset()
        return ended

    def _remove(self, entries: dict[int, Unfinished], request_id: int) -> None:
        entry = entries.pop(request_id, None)
        if entry is not None:
            self._of_state.remove(entry)
            self._num_suspects -= entry.is_suspect
            self._num_of_adapter[entry.submit.adapter] -= 1
            if not self._num_of_adapter[entry.submit.adapter]:
                del self._num_of_adapter[entry.submit.adapter]
            self._candidates.pop(request_id, None)
            for run in entry.submit.media:
                waiting = self._of_medium.get(run.identity, {})
                waiting.pop(request_id, None)
                if not waiting:
                    self._of_medium.pop(run.identity, None)


def _later(submit: Submit, elapsed_s: float, since_ttft_s: float) -> Submit:
    """Returns the request with its remaining times, which are below 0 if they are over."""
    origin = submit.origin
    if origin.deadline_s is None and origin.patience_s is None and origin.ttft_s is None:
        return submit
    deadline_s = None if origin.deadline_s is None else origin.deadline_s - elapsed_s
    patience_s = None if origin.patience_s is None else origin.patience_s - elapsed_s
    ttft_s = None if origin.ttft_s is None else origin.ttft_s - since_ttft_s
    origin = msgspec.structs.replace(origin, deadline_s=deadline_s, patience_s=patience_s, ttft_s=ttft_s)
    return msgspec.structs.replace(submit, origin=origin)


def aborted(request_id: int) -> Failed:
    """Returns the answer to an aborted request."""
    return Failed(request_id, Cancelled.code, "the request was aborted")


def without_adapter(entry: Unfinished) -> Failed:
    """Returns the answer to a request whose adapter cannot be loaded again."""
    return Failed(entry.submit.request_id, EngineDown.code, lost_adapter(entry.submit))


def lost_adapter(submit: Submit) -> str:
    """Returns why the adapter of a request is not there."""
    name = submit.origin.adapter
    return (
        f"the engine restarted, and could not load the adapter {name!r} of this request again, as its files "
        "have changed: load it"
    )


def _blame(entry: Unfinished) -> Failed:
    why = f"the engine died {entry.deaths} times while running this request, which is not retried"
    return Failed(entry.submit.request_id, EngineFailed.code, why)
