"""``agentflow run``: a program of a Python file on the inputs of a JSONL or CSV file.

All inputs are read and checked before the first one runs. With ``-o``, results are written to a file from
which ``--resume`` continues, otherwise to standard output in the order of the inputs; the progress is shown
on standard error.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints

import anyio
import msgspec

from agentflow.backends.open_session import session
from agentflow.cli.command import Command, positive_int
from agentflow.cli.server_query import API_KEY_VARIABLE
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.errors import AgentflowError, BadArgument
from agentflow.language.batch.inputs import Parameters, TableRow, program_function
from agentflow.language.batch.map import ProgramMap
from agentflow.language.program import Program
from agentflow.language.typed.json_form import json_text

ProgramFunction = Callable[..., Awaitable[Any]]

SOME_FAILED = 3
"""The exit status if inputs failed."""
MAX_CELL_CHARS = 2**31 - 1
"""The longest field of a table: the module ``csv`` needs a limit."""


def load_program(place: str) -> ProgramFunction:
    """The program of ``FILE.py:NAME`` or ``MODULE:NAME``; without a name, the only ``af.program`` in it.
    ``BadArgument`` if there is none."""
    file, _, name = place.partition(":") if not place.endswith(".py") else (place, "", "")
    module = _load_module(file)
    programs = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    if not name:
        if len(programs) != 1:
            raise BadArgument(f"{file} has {_listed(programs)}: name one, as in {file}:NAME")
        return next(iter(programs.values()))
    found = getattr(module, name, None)
    if found is None:
        close = get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], 1)
        advice = f": did you mean {close[0]!r}?" if close else f" (it has {_listed(programs)})"
        raise BadArgument(f"{file} has no {name!r}{advice}")
    if not (isinstance(found, Program) or inspect.iscoroutinefunction(found)):
        raise BadArgument(
            f"{file}:{name} is no program: a program is an async function of a state, with @af.program"
        )
    return found  # type: ignore[no-any-return]


def _listed(programs: dict[str, Any]) -> str:
    return f"the programs {', '.join(programs)}" if programs else "no program"


def _load_module(file: str) -> ModuleType:
    path = Path(file)
    if path.suffix == ".py" or os.sep in file:
        if not path.is_file():
            raise BadArgument(f"there is no file {file}")
        sys.path.insert(0, str(path.resolve().parent))
        # A file may be called like a module that others import, such as random.
        name = f"{path.stem} (program)" if path.stem in sys.modules else path.stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
    else:
        sys.path.insert(0, os.getcwd())
        spec = None
    try:
        if spec is None:
            return importlib.import_module(file)
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadArgument(f"{file} cannot be loaded: {_shown(error)}") from error
    return module


def _shown(error: BaseException) -> str:
    """The error in one line, with the line of the program that raised it."""
    what = f"{type(error).__name__}: {error}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return what if len(own) < 2 else f"{what} ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})"


@dataclass(frozen=True)
class InputFile:
    """The inputs in a file: JSONL, or CSV with a header if it is named so. ``-`` is standard input."""

    name: str
    program: ProgramFunction

    def read(self) -> list[Any]:
        """All inputs. ``BadArgument`` for an invalid one, with the file and the line."""
        try:
            if self.name == "-":
                return list(self._inputs(sys.stdin))
            with open(self.name, encoding="utf-8-sig", newline="") as file:
                return list(self._inputs(file))
        except FileNotFoundError:
            raise BadArgument(f"there is no file {self.name}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadArgument(f"{self.name} cannot be read: {error}") from None

    def _inputs(self, file: TextIO) -> Iterator[Any]:
        return self._of_csv(file) if self.name.lower().endswith(".csv") else self._of_json(file)

    def _of_json(self, file: TextIO) -> Iterator[Any]:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise BadArgument(f"{self.name}, line {number}: not JSON: {error}") from None
                yield self._checked(TableRow(value) if isinstance(value, dict) else value, number)

    def _of_csv(self, file: TextIO) -> Iterator[TableRow]:
        kinds = _scalar_types(self.program)
        reader = csv.DictReader(file, strict=True)
        limit = csv.field_size_limit(MAX_CELL_CHARS)  # of this process
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise BadArgument(
                        f"{self.name}, line {reader.line_num}: it has not the fields of the header"
                    )
                cells = {name: self._cell(reader, name, text, kinds) for name, text in row.items()}
                yield self._checked(TableRow(cells), reader.line_num)
        except csv.Error as error:
            raise BadArgument(f"{self.name}, line {reader.line_num}: not CSV: {error}") from None
        finally:
            csv.field_size_limit(limit)

    def _checked(self, item: Any, number: int) -> Any:
        try:
            Parameters(self.program).arguments(item)
        except BadArgument as error:
            raise BadArgument(f"{self.name}, line {number}: {error}") from None
        return item

    def _cell(
        self, reader: csv.DictReader[str], name: str, text: str, kinds: dict[str, tuple[type, bool]]
    ) -> Any:
        if name not in kinds:
            return text
        kind, is_optional = kinds[name]
        if is_optional and not text.strip():
            return None
        try:
            return msgspec.convert(text.strip(), kind, strict=False)
        except msgspec.ValidationError:
            raise BadArgument(
                f"{self.name}, line {reader.line_num}: {name} is {text!r}, and the program takes "
                f"{'an int' if kind is int else f'a {kind.__name__}'}"
            ) from None


def _scalar_types(program: ProgramFunction) -> dict[str, tuple[type, bool]]:
    """The parameters that are numbers or booleans, which CSV files contain as text, and whether they may be
    None."""
    try:
        hints = get_type_hints(program_function(program))
    except (NameError, TypeError):  # an annotation that is undefined here
        return {}
    found: dict[str, tuple[type, bool]] = {}
    for name, hint in hints.items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [kind for kind in options if kind is not NoneType]
        if len(kinds) == 1 and kinds[0] in (int, float, bool):
            found[name] = kinds[0], NoneType in options
    return found


class InputRun:
    """One run of the command. ``failures``: the failures so far."""

    def __init__(self, options: argparse.Namespace, program: ProgramFunction, inputs: list[Any]) -> None:
        self._options = options
        self._program = program
        self._inputs = inputs
        self.failures: list[Exception] = []
        self._results: ProgramMap[Any] | None = None

    async def run(self) -> None:
        """Runs the program on all inputs."""
        options = self._options
        flow_of = session(
            options.url,
            model=options.model,
            api_key=options.api_key,  # without it, the session reads the variable of the address
            seed=options.seed,
            max_cost=options.max_cost,
        )
        async with flow_of as flow:
            self._results = results = flow.map(
                self._program,
                self._inputs,
                concurrency=options.concurrency,
                retries=options.retries,
                resume=options.output,
                key=options.key,
                batch=options.batch,
                on_error="return",
                progress=not options.quiet,
            )
            async with results.pairs() as pairs:
                async for item, result in pairs:
                    if isinstance(result, Exception):
                        self.failures.append(result)
                    if options.output is None:
                        print(_line(item, result))

    def summary(self) -> int:
        """Prints the failures. Returns the exit status."""
        if not self.failures:
            return 0
        first = self.failures[0]
        self.report(
            f"{len(self.failures):,} of {len(self._inputs):,} inputs failed, the first with "
            f"{type(first).__name__}: {first}",
            "runs them again",
        )
        return SOME_FAILED

    def report(self, what: str, effect: str) -> None:
        """Prints to standard error, with the effect of resuming."""
        print(f"agentflow: {what}", file=sys.stderr)
        if self._options.output is not None:
            command = "the same command" if self._options.resume else "the same command with --resume"
            print(f"agentflow: {command} {effect}", file=sys.stderr)

    @property
    def num_ended(self) -> int:
        """The number of inputs that have ended."""
        return 0 if self._results is None else self._results.num_done

    @property
    def progress(self) -> str:
        """The number of ended inputs, for a message."""
        return f"after {self.num_ended:,} of {len(self._inputs):,} inputs"


def _line(item: Any, result: Any) -> str:
    is_failure = isinstance(result, Exception)
    ended = {"error": f"{type(result).__name__}: {result}"} if is_failure else {"result": result}
    try:
        return json_text({"input": item, **ended}, is_read_back=False)
    except ValueError as error:
        raise BadArgument(f"the program returned a value that has no form in JSON: {error}") from None


def _check_output(path: str) -> None:
    if os.path.isdir(path):
        raise BadArgument(f"{path} is a folder: give a file with -o")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise BadArgument(f"there is no folder {folder} for the results")
    from agentflow.language.batch.results_file import check_path  # other commands keep no results

    check_path(path)


def run_inputs(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if options.output is None and (options.resume or options.key is not None):
        option = "--resume" if options.resume else "--key"
        raise BadArgument(f"{option} needs a file of results: give one with -o")
    if options.output is not None:
        _check_output(options.output)
    program = load_program(options.program)
    inputs = InputFile(options.inputs, program).read()
    if options.output is not None and not options.resume and os.path.exists(options.output):
        raise BadArgument(f"{options.output} exists: continue it with --resume, or remove it")
    batch = InputRun(options, program, inputs)
    collect_garbage_rarely()  # it would stop all runs
    try:
        anyio.run(batch.run)
    except KeyboardInterrupt:
        batch.report(f"interrupted {batch.progress}", "continues")
        return 130
    except (AgentflowError, OSError) as error:
        if isinstance(error, BrokenPipeError) or not batch.num_ended:
            raise
        batch.report(f"{type(error).__name__} {batch.progress}: {error}", "continues")
        return 1
    return batch.summary()


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("program", metavar="PROGRAM", help="FILE.py:NAME or MODULE:NAME; without a name, the only program")
    add("inputs", metavar="INPUTS", help="a JSONL file, or a CSV file with a header; -: standard input")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="a JSONL file to which each result is appended as it ends (default: standard output)",
    )
    add("--resume", action="store_true", help="continue FILE: run only the inputs without a result there")
    add("--key", metavar="FIELD", help="the field that identifies an input (default: all of it)")
    add("--url", help="a server, such as ws://127.0.0.1:8410 (default: AGENTFLOW_URL, or none)")
    add(
        "--model",
        metavar="NAME",
        help="a model's name, folder or GGUF file (default: smollm2-135m)",
    )
    add("--api-key", metavar="KEY", help=f"key (default: {API_KEY_VARIABLE}, or the vendor's variable)")
    add(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="inputs that run concurrently (default: as many as the engine runs in one batch)",
    )
    add(
        "--retries",
        type=_number,
        default=2,
        metavar="N",
        help="how often an input runs again after a transient failure (%(default)s)",
    )
    add(
        "--batch",
        action="store_true",
        help="run the gens in batches of OpenAI or Anthropic, at half the price, within a day",
    )
    add(
        "--max-cost",
        type=float,
        metavar="DOLLARS",
        help="limit on the cost of all calls to models behind APIs together (default: no limit)",
    )
    add("--seed", type=int, metavar="N", help="with the same seed, the same inputs get the same results")
    add("-q", "--quiet", action="store_true", help="show no progress")


def _number(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


COMMAND = Command(
    name="run",
    summary="run a program on many inputs",
    description="""\
Runs an async function of a state (@af.program) on each line of a JSONL file,
or each row of a CSV file. The fields of an object or a row are the program's
arguments; other fields are kept in the output. Any other value is its only
argument.

Standard output gets one JSON line for each input, with its "result" or "error".
A file (-o FILE) gets only the results, as lines of JSON; FILE.resume next to it
has the errors and the data for --resume. Ctrl-C or a crash loses no result, and
--resume runs the rest.

Exit status: 0 if all inputs have a result, 3 if some failed, 2 for an invalid
argument or input, 1 for any other error, 130 after Ctrl-C.""",
    examples="""\
agentflow run judge.py:judge essays.jsonl -o grades.jsonl
agentflow run judge.py:judge essays.jsonl -o grades.jsonl --resume
agentflow run judge.py essays.csv --url ws://127.0.0.1:8410 --concurrency 256
agentflow run judge.py in.jsonl --url openai:gpt-4.1-mini --batch --max-cost 2
echo '"On plants."' | agentflow run judge.py -
""",
    add_options=_add_options,
    run=run_inputs,
)
