"""Branch, solve, merge: judges an essay along four dimensions in parallel, then as a whole.

This is the example of the SGLang paper (Zheng et al., 2024, figure 2) without its image. A select decides
whether to continue. A fork judges four dimensions in parallel from one shared prefix. The summary refers to
the judgments, so the program does not wait for them. A select chooses the grade.

    python examples/essay_judge.py [ESSAY_FILE] [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import agentflow as af

ESSAY = """\
Every green leaf is a factory that runs on light. Chlorophyll catches a photon and hands its energy
to an electron; water is split, oxygen is set free, and the energy is stored in molecules that later
build sugar out of air. A single maple makes enough oxygen in a year for two people. In our own
experiment, ten bean plants behind red glass grew twice as tall as ten behind green glass, because
chlorophyll reflects the green light that it cannot use. So when we call plants simple, we forget
that they do each morning what no machine of ours can do: they turn sunlight into food."""

DIMENSIONS = {
    "clarity": "Is the essay clear and easy to follow?",
    "evidence": "Does the essay support its claims with evidence?",
    "originality": "Does the essay have ideas of its own?",
    "style": "Is the essay well written?",
}


@dataclass
class Report:
    """The result of the judge."""

    related: bool
    summary: str = ""
    grade: str = ""


@af.program
async def judge(s: af.State, essay: str) -> Report:
    """Judges an essay, with a grade from A to D."""
    s += af.system("You are a judge of school essays. You answer in plain, short sentences.")
    s += af.user(f"Read this essay:\n\n{essay}\n\nIs the essay about science? Answer yes or no.")
    s += af.assistant(af.select("related", ["yes", "no"]))
    if await s["related"] == "no":
        return Report(related=False)

    async with s.fork(len(DIMENSIONS)) as branches:
        for branch, question in zip(branches, DIMENSIONS.values(), strict=True):
            branch += af.user(f"{question} Give your reason in one or two sentences.")
            branch += af.assistant(af.gen("judgment", max_tokens=56, stop="\n"))

    # Nothing is awaited here: the engine inserts the judgments into the next turn.
    findings = [f"{name}: {branch['judgment']}\n" for name, branch in zip(DIMENSIONS, branches, strict=True)]
    s += af.user(
        "Four judges wrote:\n", *findings, "What do the judges say about the essay? Answer in two sentences."
    )
    s += af.assistant(af.gen("summary", max_tokens=72, stop="\n"))
    s += af.user("Which grade does the essay deserve: A, B, C or D? Answer with the letter alone.")
    s += af.assistant(af.select("grade", ["A", "B", "C", "D"]))
    return Report(related=True, summary=await s["summary"], grade=await s["grade"])


class Board:
    """Shows the text of all branches side by side."""

    def __init__(self) -> None:
        self.texts: dict[tuple[tuple[int, ...], str], str] = {}
        self.done: set[tuple[tuple[int, ...], str]] = set()

    def update(self, event: af.ProgramEvent) -> None:
        """Adds an event of the running program."""
        if isinstance(event, af.TextDelta):
            key = (event.path, event.name)
            self.texts[key] = self.texts.get(key, "") + event.text
        elif isinstance(event, af.VariableDone):
            self.done.add((event.path, event.name))

    def panel(self, title: str, path: tuple[int, ...], name: str, width: int | None = None) -> Panel:
        """Returns the panel of one branch; its border turns green when the branch is done."""
        is_done = (path, name) in self.done
        text = Text(self.texts.get((path, name), "…").strip())
        return Panel(
            text, title=title, title_align="left", width=width, border_style="green" if is_done else "dim"
        )

    def render(self, width: int) -> Group:
        """Returns all panels, for a terminal of ``width`` columns."""
        per_row = 4 if width >= 120 else 2
        column = (width - per_row + 1) // per_row
        branches = [self.panel(name, (i,), "judgment", column) for i, name in enumerate(DIMENSIONS)]
        return Group(
            self.panel("about science?", (), "related"),
            Columns(branches, padding=(0, 1), equal=True),
            self.panel("summary", (), "summary"),
            self.panel("grade", (), "grade"),
        )


async def follow(flow: af.Session, essay: str, console: Console) -> tuple[Report, float]:
    """Runs the judge with a live display. Returns the report and the seconds until the first text."""
    board = Board()
    start = time.perf_counter()
    first_text_s = 0.0
    report = Report(related=False)
    with Live(console=console, refresh_per_second=12, transient=not console.is_terminal) as live:
        async for event in flow.stream(judge, essay):
            first_text_s = first_text_s or time.perf_counter() - start
            board.update(event)
            if isinstance(event, af.RunDone):
                report = event.result
            if console.is_terminal:
                live.update(board.render(console.width))
    if not console.is_terminal:
        console.print(board.render(min(console.width, 100)))
    return report, first_text_s


def show_stats(
    console: Console, before: af.Stats, after: af.Stats, elapsed_s: float, first_text_s: float
) -> None:
    """Prints the figures of this run, one per line."""
    prompt = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    generated = after.generated_tokens - before.generated_tokens
    rows = {
        "prompt tokens": f"{prompt:,}",
        "of which cached": f"{cached:,}",
        "hit rate": f"{cached / max(1, prompt):.1%}",
        "generated tokens": f"{generated:,}",
        "tokens per second": f"{generated / elapsed_s:.1f}",
        "first answer after": f"{first_text_s:.2f} s",
    }
    if after.cost > before.cost:
        rows["cost"] = f"${after.cost - before.cost:.4g}"
    # A model behind an API reports neither steps nor memory.
    if after.steps is not None and before.steps is not None:
        rows["forward steps"] = f"{after.steps - before.steps:,}"
    if after.peak_resident_bytes is not None:
        rows["peak memory"] = f"{after.peak_resident_bytes / 1e9:.2f} GB"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), Text(value, justify="right"))
    console.print(table)


async def main() -> int:
    """Parses the arguments, opens a session and shows the run."""
    parser = argparse.ArgumentParser(description="Judge an essay along four dimensions at once.")
    parser.add_argument("essay", nargs="?", type=Path, help="a text file (default: an essay on leaves)")
    parser.add_argument("--url", help="a server's url (default: the embedded engine)")
    options = parser.parse_args()
    console = Console()
    essay = options.essay.read_text(encoding="utf-8") if options.essay else ESSAY
    try:
        with console.status(
            "Loading the model …" if options.url is None else f"Connecting to {options.url} …"
        ) as status:
            async with af.session(options.url) as flow:
                status.stop()
                console.print(f"[bold]agentflow[/] judges an essay with [bold]{flow.capabilities.model}[/]\n")
                before = await flow.stats()
                start = time.perf_counter()
                report, first_text_s = await follow(flow, essay, console)
                elapsed_s = time.perf_counter() - start
                if not report.related:
                    console.print("The judge says that this essay is not about science, and stops here.")
                show_stats(console, before, await flow.stats(), elapsed_s, first_text_s)
    except af.AgentflowError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
