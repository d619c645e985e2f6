"""The GPUs of an engine, and the reports of a model with a single engine to the routers of models that share
them (``routing.devices``)."""

from __future__ import annotations

from collections.abc import Sequence

from agentflow.cluster.routing.devices import SharedDevices, SharedEngine
from agentflow.engine.machine.resources import devices_from, gpu_number
from agentflow.engine.messages import Failed, Finished, FromEngine
from agentflow.engine.options import EngineOptions
from agentflow.engine.request import Submit


class BusyObserver:
    """A ``RequestObserver`` of a model with a single engine, which has no router."""

    def __init__(self, devices: SharedDevices, engine: SharedEngine) -> None:
        self._devices = devices
        self._engine = engine
        self._unfinished: set[int] = set()

    def sent(self, submit: Submit) -> None:
        """A request was sent to the engine."""
        self._unfinished.add(submit.request_id)
        self._devices.set_busy(self._engine, len(self._unfinished))

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Requests may have ended."""
        ended = [one.request_id for one in messages if isinstance(one, Finished | Failed)]
        if ended:
            self._unfinished.difference_update(ended)
            self._devices.set_busy(self._engine, len(self._unfinished))


def list_gpus(options: EngineOptions) -> Sequence[str]:
    """The GPUs of an engine, by number; none if it runs on processors. Without a device it has the first one,
    if there are any."""
    if options.device == "cpu":
        return ()
    first = f"cuda:{gpu_number(options.device)}"
    return [device for device in devices_from(first, options.tensor_parallel) if device is not None]
