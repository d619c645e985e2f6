"""The settings of Ray nodes on one machine, on loopback addresses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
# The nodes inherit these.
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}
# A node that is gone is found out in a second, and processes start when they are needed.
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
WORKER = str(ROOT / "tests" / "support" / "ray_worker.py")
AGENT = [sys.executable, "-S", str(ROOT / "tests" / "support" / "ray_agent.py")]
