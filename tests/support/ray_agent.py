"""A process in place of each of a Ray node's two agents, of which the node waits for the ports. It says that
they have none, and ends with the node."""

import ctypes
import os
import signal
import sys
from pathlib import Path

SERVICES = ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent")
PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
for service in SERVICES:
    file = Path(options["--session-dir"], f"{service}_port_{options['--node-id']}")
    file.with_name(f"{file.name}.{os.getpid()}").write_text("-1")
    file.with_name(f"{file.name}.{os.getpid()}").rename(file)  # the node aborts if it reads an empty file
signal.pause()
