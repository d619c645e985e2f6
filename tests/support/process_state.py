"""Settings of this process that a file of tests must leave as it found them: other files would meet them."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGPROF", "SIGXCPU")
_OF_ENGINES = "AGENTFLOW_CPU"  # an engine in the process may set it (``keep_order``)
_STATUS = Path("/proc/self/status")


def process_state() -> dict[str, object]:
    """The settings by their names, on Linux, including agentflow's environment variables."""
    found: dict[str, object] = {
        "working folder": os.getcwd(),
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("AGENTFLOW_") and name != _OF_ENGINES
        },
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "time-out of sockets": socket.getdefaulttimeout(),
        "logging": (logging.root.level, logging.root.manager.disable, logging.getLogRecordFactory()),
        "signal handlers": {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS},
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memory": resource.getrlimit(resource.RLIMIT_AS),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }
    [found["umask"]] = [line for line in _STATUS.read_text().splitlines() if line.startswith("Umask:")]
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        found["torch"] = (torch.get_default_dtype(), torch.is_grad_enabled())
    return found


def changed(before: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Returns the settings that differ from ``before``, an earlier ``process_state``: the old and the new
    value of each. The settings of a package that was imported in between are not compared."""
    now = process_state()
    return {name: (was, now.get(name)) for name, was in before.items() if now.get(name) != was}
