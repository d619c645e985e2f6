"""The built wheel, installed bare in a clean environment, is a frontend without torch."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

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
"""


@pytest.mark.timeout(300)
def test_a_bare_install_is_the_frontend(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        packed = {name.removeprefix(PAGE) for name in files.namelist() if name.startswith(PAGE)}
    built = {file.relative_to(ROOT / PAGE).as_posix() for file in (ROOT / PAGE).rglob("*") if file.is_file()}
    assert packed == built >= {"index.html"}
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    greeting, advice = run(python, "-c", PROBE).splitlines()
    assert greeting == "hi there"
    assert "agentflow-lm[engine]" in advice
    names = "import importlib.metadata as m; print(*[one.name for one in m.distributions()])"
    installed = run(python, "-c", names)
    assert "agentflow-lm" in installed
    assert "torch" not in installed
    report = json.loads(run(python, "-m", "agentflow", "doctor", "--json", "--port", "0"))
    torch = next(check for check in report["checks"] if check["name"] == "torch")
    assert (report["ready"], torch["status"]) == (True, "warning")
    plugin = "import importlib.metadata as m; print(*[p.value for p in m.entry_points(group='pytest11')])"
    assert "pytest_agentflow" in run(python, "-c", plugin).split()
    assert any((tmp_path / "clean").glob("lib/*/site-packages/pytest_agentflow.py"))
