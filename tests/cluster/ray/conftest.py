"""Ray on one machine: a cluster of two nodes on two loopback addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[tuple]:
    """The cluster, and its second node."""
    pytest.importorskip("ray", reason="needs the extra cluster")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        from ray.cluster_utils import Cluster

        head = {**NODE, "node_ip_address": HEAD, "_system_config": SYSTEM}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster, cluster.add_node(**NODE, node_ip_address=SECOND)
        finally:
            cluster.shutdown()
