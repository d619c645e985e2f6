"""The built wheel, installed bare in a clean environment, is a frontend without torch."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from build import ProjectBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = "agentflow/server/ui/static/"

PROBE = """
import sys, anyio, agentflow as af
heavy = {"torch", "transformers", "starlette", "uvicorn", "numpy"} & set(sys.modules)
assert not heavy, heavy

from agentflow.backends.apis.capability_table import model_facts  # reads a file of the package
assert model_facts("openai", "gpt-4o").tools == "always"

@af.program
async def greet(s):
    s += af.user("Hello")
    s += af.assistant(af.gen("answer"))
    return await s["answer"]

async def main():
    async with af.session(backend=af.Scripted(["hi there"])) as flow:
        print(await flow.run(greet))
    try:
        async with af.session() as flow:
            pass
    except af.errors.ModelError as error:
        print(error)

anyio.run(main)

from importlib import metadata
print(*[one.name for one in metadata.distributions()])
print(*[one.value for one in metadata.entry_points(group="pytest11")])
"""


def needed(lines: list[str]) -> dict[str, Distribution]:
    """The installed distributions that these requirements need. pip would take seconds to resolve them."""
    found: dict[str, Distribution] = {}
    waiting = [*map(Requirement, lines)]
    while waiting:
        asked = waiting.pop()
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        assert not asked.extras
        one = distribution(asked.name)
        assert asked.specifier.contains(one.version, prereleases=True), str(asked)
        if one.name not in found:
            found[one.name] = one
            waiting += map(Requirement, one.requires or ())
    return found


@pytest.mark.timeout(300)
def test_a_bare_install_is_the_frontend(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wheel = ProjectBuilder(ROOT).build("wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as files:
        packed = {name.removeprefix(PAGE) for name in files.namelist() if name.startswith(PAGE)}
        [about] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = Parser().parsestr(files.read(about).decode()).get_all("Requires-Dist")
    built = {file.relative_to(ROOT / PAGE).as_posix() for file in (ROOT / PAGE).rglob("*") if file.is_file()}
    assert packed == built >= {"index.html"}
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel)
    [packages] = (tmp_path / "clean").glob("lib/*/site-packages")
    for one in needed(requirements).values():
        for name in {file.parts[0] for file in one.files} - {"..", "__pycache__"}:
            (packages / name).symlink_to(one.locate_file(name))
    greeting, advice, installed, plugins = run(python, "-c", PROBE).splitlines()
    assert greeting == "hi there"
    assert "agentflow-lm[engine]" in advice
    assert "agentflow-lm" in installed
    assert "torch" not in installed
    report = json.loads(run(python, "-m", "agentflow", "doctor", "--json", "--port", "0"))
    torch = next(check for check in report["checks"] if check["name"] == "torch")
    assert (report["ready"], torch["status"]) == (True, "warning")
    assert "pytest_agentflow" in plugins.split()
    assert (packages / "pytest_agentflow.py").is_file()
