"""``python -m benchmarks soak [--minutes 10] [--replicas 1] [--out DIR]``: good and bad clients on a real
server whose engine is killed twice, or whose replicas are killed and stopped ten times. Reports leaks, and
writes soak.svg, soak.json and the server's log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import anyio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import machine
from benchmarks.soak import clients, rude
from benchmarks.soak.clients import ANSWER_S, Scenario, Target
from benchmarks.soak.plot import plot
from benchmarks.soak.samples import Check, Sample, growth_checks, rest_checks
from benchmarks.soak.server import RESUME_GRACE_S, SoakServer, soak_server

NUM_CLIENTS = 8
# The mean pause between two scenarios of a client: the server is busy, but not overloaded.
PAUSE_S = 0.5
SAMPLE_S = 3.0
KILLS_AT = (0.25, 0.45)
# With replicas, one that is chosen at random is killed, or stopped, at each of these.
KILLS_OF_REPLICAS_AT = tuple(number / 20 for number in range(1, 11))
# After all clients have disconnected, the server releases everything within the grace period of sessions,
# plus the time to detect the disconnections.
REST_S = RESUME_GRACE_S + 30.0
SEED = 1
WRONG = "WRONG"


class Soak:
    """One run."""

    def __init__(self, server: SoakServer, minutes: float, replicas: int = 1) -> None:
        self.samples: list[Sample] = []
        self.kills_s: list[float] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._minutes = minutes
        self._kills_at = KILLS_AT if replicas == 1 else KILLS_OF_REPLICAS_AT
        self._replicas = replicas
        self._has_ended = False

    async def run(self) -> list[Check]:
        """Runs the whole soak run. Returns the checks."""
        before = await self._server.sample()
        self.samples.append(before)
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch)
            watchers.start_soon(self._kill)
            with anyio.move_on_after(self._minutes * 60 + ANSWER_S):
                async with anyio.create_task_group() as running:
                    for number in range(NUM_CLIENTS):
                        running.start_soon(self._client, Random(f"{SEED} {number}"))
            self._has_ended = True
            watchers.cancel_scope.cancel()
        after = await self._rest(before)
        lines = self._server.unexpected_lines()
        return [
            Check("the server lives", self._server.is_alive, f"{self._server.is_alive}", "True"),
            Check(
                "engine killed",
                len(self.kills_s) == len(self._kills_at),
                f"{len(self.kills_s)}",
                f"{len(self._kills_at)}",
            ),
            *rest_checks(before, after),
            *growth_checks(self.samples, self._minutes, max(self.kills_s, default=0.0)),
            Check("wrong answers", not self.wrong, f"{len(self.wrong)}", "0"),
            Check("unexpected lines in the log", not lines, f"{len(lines)}", "0"),
        ]

    async def _client(self, random: Random) -> None:
        scenarios: dict[Scenario, int] = {**clients.SCENARIOS, **rude.SCENARIOS}
        while self._server.now_s < self._minutes * 60:
            [scenario] = random.choices(list(scenarios), list(scenarios.values()))
            outcome = await self._outcome(scenario, random)
            self.outcomes[scenario.__name__, outcome] += 1
            await anyio.sleep(random.random() * 2 * PAUSE_S)  # noqa: TID251  the rate is part of the run

    async def _outcome(self, scenario: Scenario, random: Random) -> str:
        target = Target(self._server, Random(random.random()))
        try:
            with anyio.fail_after(ANSWER_S):
                return await scenario(target)
        except Exception as error:
            self.wrong.append(f"{self._server.now_s:.0f} s, {scenario.__name__}: {error!r}"[:400])
            return WRONG

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(SAMPLE_S)  # noqa: TID251  the interval is part of the run
            self.samples.append(await self._server.sample())

    async def _kill(self) -> None:
        random = Random(f"{SEED} kills")
        for share in self._kills_at:
            is_stop = self._replicas > 1 and random.random() < 0.5
            end = self._server.stop_engine if is_stop else self._server.kill_engine
            at_s = share * self._minutes * 60
            await anyio.sleep(max(0.0, at_s - self._server.now_s))  # noqa: TID251
            while not end(random):  # noqa: ASYNC110  it is being started
                await anyio.sleep(0.5)  # noqa: TID251
            self.kills_s.append(self._server.now_s)

    async def _rest(self, before: Sample) -> Sample:
        """Returns the first sample in which everything is released, or the last one before the timeout."""
        begun_s = self._server.now_s
        while True:
            sample = await self._server.sample()
            self.samples.append(sample)
            is_over = self._server.now_s - begun_s > REST_S
            if is_over or all(check.holds for check in rest_checks(before, sample)):
                return sample
            await anyio.sleep(1)  # noqa: TID251  there is no event to wait for


def main(minutes: float, folder: Path, console: Console, replicas: int = 1) -> int:
    """Runs a soak run. Returns 1 if something leaked or an answer was wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("httpx", "openai", "anthropic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    load = machine.OthersLoad()
    with soak_server(folder / "server.log", replicas) as server:
        soak = Soak(server, minutes, replicas)
        checks = anyio.run(soak.run)
        lines = server.unexpected_lines()
    _show(console, soak, checks)
    for line in [*soak.wrong[:20], *lines[:40]]:
        console.print(escape(line), style="red", highlight=False)
    title = f"agentflow serve under {NUM_CLIENTS} clients, {minutes:g} minutes"
    (folder / "soak.svg").write_text(plot(soak.samples, soak.kills_s, title), encoding="utf-8")
    results = {
        "commit": machine.commit(),
        "others_cores": round(load.cores(), 2),
        "minutes": minutes,
        "replicas": replicas,
        "checks": [asdict(check) for check in checks],
        "outcomes": [[*key, count] for key, count in sorted(soak.outcomes.items())],
        "kills_s": soak.kills_s,
        "samples": [asdict(sample) for sample in soak.samples],
    }
    (folder / "soak.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {folder}: soak.svg, soak.json, server.log")
    return 0 if all(check.holds for check in checks) else 1


def _show(console: Console, soak: Soak, checks: Sequence[Check]) -> None:
    outcomes = Table("client", "outcome", "count", title="How clients fared", title_justify="left")
    for (name, outcome), count in sorted(soak.outcomes.items()):
        style = "red" if outcome == WRONG else ""
        outcomes.add_row(name.replace("_", " "), outcome, f"{count}", style=style)
    console.print(outcomes)
    table = Table("condition", "found", "wanted", title="Afterwards", title_justify="left")
    for check in checks:
        table.add_row(check.name, check.found, check.wanted, style="green" if check.holds else "red")
    console.print(table)
