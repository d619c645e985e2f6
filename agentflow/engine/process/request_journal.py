"""What an engine process owes: the requests it was given, how far they are, and which may be deadly.

When the process dies, everything here is given to the next one, in the order of submission, with the
ids that were generated already. A request that brings the process down each time must not do so for
ever, nor take the others along: whoever was running at two deaths and made no progress between them
is a *suspect*. Suspects are tried one after the other, while everybody else waits; one that makes
progress is cleared, and one at whose trial the process dies is *convicted*: it fails, alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from agentflow.engine.process.ipc import Failed, Finished, FromEngine, Progress, Started, Submit
from agentflow.engine.request import TopTokens
from agentflow.errors import Cancelled, EngineDown, EngineFailed

# Deaths without progress between them that make a suspect.
SUSPECT_DEATHS = 2
# Deaths in all. A request that lives through so many is given up, lest two requests that are deadly only
# together, and each make a little progress alone, go on for ever.
MAX_DEATHS = 10


@dataclass(slots=True, eq=False)
class _Entry:
    submit: Submit
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    is_running: bool = False
    is_aborted: bool = False
    deaths: int = 0
    deaths_since_progress: int = 0

    @property
    def is_suspect(self) -> bool:
        return self.deaths_since_progress >= SUSPECT_DEATHS

    def drop(self, num_tokens: int) -> None:
        """The last ids are replaced; of the others some may have no log-probability yet."""
        del self.ids[-num_tokens:]
        del self.logprobs[len(self.ids) :], self.top_logprobs[len(self.ids) :]

    def as_submitted(self) -> Submit:
        if not self.ids:
            return self.submit
        return msgspec.structs.replace(
            self.submit,
            generated_ids=[*self.ids],
            generated_logprobs=[*self.logprobs],
            generated_top_logprobs=[*self.top_logprobs],
        )


class RequestJournal:
    """No input or output of its own. A request is *held* until ``release`` gives it out, and then *sent*
    until its end is heard or the process dies."""

    def __init__(self) -> None:
        self._held: dict[int, _Entry] = {}
        self._sent: dict[int, _Entry] = {}
        self._num_suspects = 0

    def __len__(self) -> int:
        return len(self._held) + len(self._sent)

    @property
    def is_owed(self) -> bool:
        """Whether the process has a request that it has not ended."""
        return bool(self._sent)

    def add(self, submit: Submit) -> None:
        """A new request."""
        self._held[submit.request_id] = _Entry(submit)

    def release(self) -> list[Submit]:
        """The requests that are to be sent to the process now."""
        if not self._held:
            return []
        if not self._num_suspects:
            released = list(self._held.values())
        elif any(entry.is_suspect for entry in self._sent.values()):
            released = []  # its trial goes on
        else:
            released = [next(entry for entry in self._held.values() if entry.is_suspect)]
        for entry in released:
            del self._held[entry.submit.request_id]
            self._sent[entry.submit.request_id] = entry
        return [entry.as_submitted() for entry in released]

    def again(self, request_id: int) -> Submit | None:
        """A request that the process wants to have sent to it once more; None if it is not needed any more,
        and then it is forgotten."""
        entry = self._sent.get(request_id)
        if entry is None:
            return None
        if entry.is_aborted:
            self._remove(self._sent, request_id)
            return None
        return entry.as_submitted()

    def abort(self, request_id: int) -> bool:
        """Forgets a request, now or with its end. Returns whether the process must be told: it need
        not where the request is not with it."""
        entry = self._sent.get(request_id)
        if entry is not None:
            entry.is_aborted = True
        elif request_id in self._held:
            self._remove(self._held, request_id)
        return entry is not None

    def hear(self, message: FromEngine) -> None:
        """What the process says."""
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
                    entry.logprobs += message.logprobs
                    entry.top_logprobs += message.top_logprobs
                    if entry.deaths_since_progress:
                        self._num_suspects -= entry.is_suspect
                        entry.deaths_since_progress = 0
            case Finished() | Failed():
                self._remove(self._sent, message.request_id)

    def bury(self) -> tuple[list[Failed], bool]:
        """The process died: everything is held again. Returns the requests that end with it, and whether
        one of them was convicted of its death."""
        ended = [aborted(entry.submit.request_id) for entry in self._sent.values() if entry.is_aborted]
        running = [entry for entry in self._sent.values() if entry.is_running and not entry.is_aborted]
        self._held = dict(sorted((self._held | self._sent).items()))  # ids grow with each submission
        self._sent = {}
        for entry in running:
            entry.deaths += 1
            entry.deaths_since_progress += 1
            entry.is_running = False
        suspects = [entry for entry in running if entry.is_suspect]
        convicted = suspects if len(suspects) == 1 else []
        exhausted = [entry for entry in running if entry.deaths >= MAX_DEATHS and entry not in convicted]
        ended += [_killer(entry) for entry in convicted + exhausted]
        for failed in ended:
            del self._held[failed.request_id]
        self._num_suspects = sum(entry.is_suspect for entry in self._held.values())
        return ended, bool(convicted)

    def fail_all(self, why: str) -> list[Failed]:
        """Nothing more is run: all requests end, and are forgotten."""
        ended = [Failed(request_id, EngineDown.code, why) for request_id in sorted(self._held | self._sent)]
        self._held, self._sent, self._num_suspects = {}, {}, 0
        return ended

    def _remove(self, entries: dict[int, _Entry], request_id: int) -> None:
        entry = entries.pop(request_id, None)
        if entry is not None and entry.is_suspect:
            self._num_suspects -= 1


def aborted(request_id: int) -> Failed:
    """The end of a request that was aborted."""
    return Failed(request_id, Cancelled.code, "the request was aborted")


def _killer(entry: _Entry) -> Failed:
    why = f"the engine died {entry.deaths} times while it ran this request, which is not run again"
    return Failed(entry.submit.request_id, EngineFailed.code, why)
