"""Ray on one machine: a cluster of two nodes on two loopback addresses."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
from support.ray_nodes import AGENT, HEAD, NODE, SECOND, SETTINGS, SYSTEM, WORKER


@pytest.fixture(scope="module", autouse=True)
def kept_process() -> Iterator[None]:
    """Ray replaces the factory of log records at its import, and the handler of SIGTERM when it connects."""
    factory, handler = logging.getLogRecordFactory(), signal.getsignal(signal.SIGTERM)
    yield
    logging.setLogRecordFactory(factory)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[tuple]:
    """The cluster, and its second node."""
    pytest.importorskip("ray", reason="needs the extra cluster")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        from ray._private import services
        from ray._private.node import Node
        from ray.cluster_utils import Cluster

        # Processes that nothing here needs: the dashboard's, two monitors, and the two agents of a node.
        patched.setattr(Node, "start_api_server", lambda *_, **__: None)
        patched.setattr(services, "_build_python_executable_command_memory_profileable", lambda *_: AGENT)
        head = {"_system_config": SYSTEM, "no_monitor": True, "include_log_monitor": False}
        node = {**NODE, "setup_worker_path": WORKER}
        cluster = Cluster(initialize_head=True, head_node_args={**node, **head, "node_ip_address": HEAD})
        try:
            yield cluster, cluster.add_node(**node, node_ip_address=SECOND)
        finally:
            cluster.shutdown()
