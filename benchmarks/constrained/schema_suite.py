"""JSON Schema's test suite: which schemas are accepted, which are rejected, and whether the texts generated
under the accepted ones are valid.

``python -m benchmarks schema_suite`` measures; ``python -m benchmarks.constrained.schema_suite`` writes the
table of docs/reference/json-schema.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
from platformdirs import user_cache_dir
from rich.console import Console
from rich.table import Table

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint, Whitespace
from benchmarks.constrained.text_walks import MOST_BYTES, text_under, walk
from benchmarks.report import Report

REQUIREMENT = "jsonschema==4.26.0"
ARCHIVE_SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = {
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json-schema.md"
MARKS = ("<!-- the table begins -->", "<!-- the table ends -->")
INSTANCES = {"small": 8, "full": 60}

_POLICIES: tuple[Whitespace, ...] = ("compact", "tight", "free")
_PREFIXES = (b"", b"{", b'{"', b"[", b"[[", b'["', b"-", b'"')


@dataclass
class Row:
    """The results for the schemas of one keyword."""

    keyword: str
    machines: int = 0  # schemas compiled to DFAs
    grammars: int = 0  # schemas compiled to grammars for llguidance
    refused: int = 0  # rejected schemas
    instances: int = 0  # generated texts
    unfinished: int = 0  # texts that did not end
    reasons: dict[str, str] = field(default_factory=dict)  # the error messages of rejected schemas
    invalid: list[str] = field(default_factory=list)  # texts that are not valid under their schema

    @property
    def schemas(self) -> int:
        """The number of all schemas."""
        return self.machines + self.grammars + self.refused


def suite_folder() -> Path:
    """Returns the suite's files, from the sdist of jsonschema, which pip fetches into the user's cache."""
    cache = Path(os.environ.get("AGENTFLOW_CACHE") or user_cache_dir("agentflow")).expanduser()
    folder = cache / f"json-schema-suite-{ARCHIVE_SHA256[:12]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as workspace:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=jsonschema"]
            command += ["--quiet", "--disable-pip-version-check", f"--dest={workspace}", REQUIREMENT]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            (archive,) = Path(workspace).glob("*.tar.gz")
            if hashlib.sha256(archive.read_bytes()).hexdigest() != ARCHIVE_SHA256:
                raise RuntimeError(f"{archive.name} has an unexpected digest: fetch it again")
            with tarfile.open(archive) as opened:
                opened.extractall(workspace, filter="data")
            (tests,) = Path(workspace).glob("*/json/tests")
            tests.rename(folder)
    return folder


def run_suite(draft: str, instances: int) -> list[Row]:
    """Returns one row per keyword of the draft; tries ``instances`` instances per schema."""
    meta_schema, validator = DRAFTS[draft]
    rows = []
    for file in sorted((suite_folder() / draft).glob("*.json")):
        row = Row(file.stem)
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": meta_schema, **schema}
            _try_schema(row, group["description"], json.dumps(schema), validator, instances)
        rows.append(row)
    return rows


def _try_schema(row: Row, name: str, source: str, validator: Any, instances: int) -> None:
    policies = _POLICIES[: max(1, instances)]
    try:
        forms = [compile_constraint(Constraint("schema", source, whitespace=policy)) for policy in policies]
    except BadArgument as error:
        row.refused += 1
        row.reasons[name] = str(error)
        return
    if forms[0].form == "dfa":
        row.machines += 1
    else:
        row.grammars += 1
    chance = random.Random(source)
    for n in range(instances):
        text = walk(text_under(forms[n % len(forms)]), chance, _PREFIXES[n % len(_PREFIXES)])
        if text is None:
            row.unfinished += 1
            continue
        row.instances += 1
        if not _is_valid(text, source, validator):
            row.invalid.append(f"{name}: {text.decode(errors='replace')}")


def _is_valid(text: bytes, source: str, validator: Any) -> bool:
    # 19.99 is a multiple of 0.01 in decimals, but not in binary floats.
    read_float = _decimal if "multipleOf" in source else float
    schema = json.loads(source, parse_float=read_float)
    try:
        value = json.loads(text, parse_float=read_float)
    except ValueError:
        return False
    with localcontext() as digits:
        digits.prec = 2 * MOST_BYTES
        return bool(validator(schema).is_valid(value))


def _decimal(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent with some ten digits
        return float(text)


def table_lines(rows_of_draft: dict[str, list[Row]]) -> Iterator[str]:
    """Yields the lines of the table in the documentation."""
    for draft, rows in rows_of_draft.items():
        yield f"**{draft}**"
        yield ""
        yield "| keyword (file of the suite) | schemas | DFA | parser | rejected |"
        yield "|---|---:|---:|---:|---:|"
        for row in [*rows, _total(rows)]:
            yield f"| {row.keyword} | {row.schemas} | {row.machines} | {row.grammars} | {row.refused} |"
        yield ""


def _total(rows: list[Row]) -> Row:
    total = Row("all")
    for row in rows:
        total.machines += row.machines
        total.grammars += row.grammars
        total.refused += row.refused
        total.instances += row.instances
        total.unfinished += row.unfinished
        total.invalid += row.invalid
    return total


def run(report: Report, console: Console, only: str) -> None:
    """Reports the figures, and prints the table of keywords."""
    for draft in DRAFTS:
        if only not in f"schema_suite.{draft}":
            continue
        rows = run_suite(draft, INSTANCES[report.scale])
        table = Table(title=draft, title_justify="left")
        for column in ("keyword", "schemas", "DFA", "parser", "rejected", "instances", "valid"):
            table.add_column(column, justify="left" if column == "keyword" else "right")
        for row in [*rows, _total(rows)]:
            counts = (row.schemas, row.machines, row.grammars, row.refused, row.instances)
            table.add_row(row.keyword, *map(str, counts), str(row.instances - len(row.invalid)))
        console.print(table)
        total = _total(rows)
        for text in total.invalid:
            console.print(text, style="red", markup=False)
        accepted, valid = total.machines + total.grammars, 1 - len(total.invalid) / total.instances
        note = f"of {total.instances:,} instances; {total.unfinished} walks did not end"
        report.add(f"schema_suite.{draft}.schemas", total.schemas, "schemas", [total.schemas])
        report.add(f"schema_suite.{draft}.accepted", accepted, "schemas", [accepted])
        report.add(f"schema_suite.{draft}.valid", valid, "ratio", [valid], note, ">= 1")


def write_page() -> None:
    """Writes the table in the documentation."""
    lines = table_lines({draft: run_suite(draft, 0) for draft in DRAFTS})
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    table = "\n".join([MARKS[0], "", *lines, MARKS[1]])
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    write_page()
