"""The build. ``AGENTFLOW_COMPILE=1`` compiles ``agentflow/server/core`` to C with mypyc (which must be
installed: it is a part of mypy), and the scheduler's steps then take little more than half as long.
Without it, or where a module is left out, the same Python files run as they are.
"""

import os
from pathlib import Path

from setuptools import setup

CORE = Path("agentflow/server/core")
INTERPRETED = {"__init__.py", "batch.py"}  # nothing there that takes time

extensions = []
if os.environ.get("AGENTFLOW_COMPILE") == "1":
    from mypyc.build import mypycify

    modules = sorted(str(path) for path in CORE.glob("*.py") if path.name not in INTERPRETED)
    # `make lint` has checked the types. Here numpy's stubs would take two minutes and change nothing.
    flags = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
    extensions = mypycify([*flags, *modules], opt_level="2", debug_level="0", group_name="agentflow_core")

setup(ext_modules=extensions)
