"""Writes the table of docs/reference/clients.md from what the last run of the tests recorded in build/."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
SUBJECTS = {
    "chat": "Chat",
    "stream": "Streams",
    "tools": "Tools",
    "typed_answers": "Typed output",
    "errors": "Errors",
    "aborts": "Aborts",
}


def rows() -> list[str]:
    """A row for each client, in the order of names."""
    found = {}
    for path in sorted((HERE / "build").glob("*.json")):
        lock = (HERE / f"{path.stem}.lock").read_text(encoding="utf-8")
        for client, passed in json.loads(path.read_text(encoding="utf-8")).items():
            version = re.search(rf"^{re.escape(client)}==([^ ]+)", lock, re.MULTILINE)
            assert version is not None, client
            cells = [{True: "yes", False: "**fails**", None: ""}[passed.get(name)] for name in SUBJECTS]
            found[client] = f"| `{client}` | {version[1]} | {' | '.join(cells)} |\n"
    return [found[client] for client in sorted(found)]


def main() -> None:
    head = f"| Client | Version | {' | '.join(SUBJECTS.values())} |\n|---|---|{'---|' * len(SUBJECTS)}\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{head}{''.join(rows())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
