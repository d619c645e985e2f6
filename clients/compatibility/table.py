"""Writes the tables of docs/reference/clients.md from what the last run of the tests recorded in build/."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"
SUBJECTS = {
    "chat": "Chat",
    "stream": "Streams",
    "tools": "Tools",
    "typed_answers": "Typed output",
    "errors": "Errors",
    "aborts": "Aborts",
}
# The environments by language.
LANGUAGES = {"Python": ("frameworks", "evaluation"), "JavaScript": ("javascript",)}


def versions(environment: str) -> dict[str, str]:
    """The locked version of each package."""
    if environment == "javascript":
        text = (HERE / "javascript" / "package.json").read_text(encoding="utf-8")
        found: dict[str, str] = json.loads(text)["devDependencies"]
        sdk = found.pop("ai")
        return {
            name: f"{one}, `ai` {sdk}" if name.startswith("@ai-sdk/") else one for name, one in found.items()
        }
    lock = (HERE / f"{environment}.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([^=\s]+)==([^ ]+)", lock, re.MULTILINE))


def table(language: str) -> str:
    """A row for each client, in the order of names, and below it why some cells have no result."""
    rows, reasons = {}, {}
    for environment in LANGUAGES[language]:
        record = HERE / "build" / f"{environment}.json"
        locked = versions(environment)
        for client, found in json.loads(record.read_text(encoding="utf-8")).items():
            if untested := SUBJECTS.keys() - found.keys():
                sys.exit(f"{record}: {client} lacks {', '.join(sorted(untested))}: run all tests")
            cells = [{True: "yes", False: "**fails**"}.get(found[name], "—") for name in SUBJECTS]
            rows[client] = f"| `{client}` | {locked[client]} | {' | '.join(cells)} |\n"
            absent = [
                f"{subject.lower()} ({found[name]})"
                for name, subject in SUBJECTS.items()
                if isinstance(found[name], str)
            ]
            if absent:
                reasons[client] = f"- `{client}`: {', '.join(absent)}.\n"
    head = f"| {language} | Version | {' | '.join(SUBJECTS.values())} |\n|---|---|{'---|' * len(SUBJECTS)}\n"
    notes = "".join(reasons[client] for client in sorted(reasons))
    return (
        head
        + "".join(rows[client] for client in sorted(rows))
        + (f"\n—: not a part of this client:\n\n{notes}" if notes else "")
    )


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n".join(table(language) for language in LANGUAGES)
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
