"""How the replicas of a model divide a machine: one GPU each, or the processors of the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from agentflow.engine.machine.resources import gpu_number, usable_cpus
from agentflow.engine.options import EngineOptions
from agentflow.errors import BadArgument


def divide_machine(options: EngineOptions, gpus: Collection[int] | None) -> Sequence[EngineOptions]:
    """Returns the options of each replica, except for its memory. With more replicas than CPU threads, each
    has one thread.

    Args:
        options: The options of the model.
        gpus: The numbers of the machine's GPUs, if the model runs on them; its ``device`` is the first.

    Raises:
        BadArgument: There are more replicas than GPUs.
    """
    count, ranks = options.replicas, options.tensor_parallel
    if count == 1:
        return [options]
    if gpus is not None:
        first, end = gpu_number(options.device), gpu_number(options.device) + count * ranks
        missing = [number for number in range(first, end) if number not in gpus]
        if missing:
            raise BadArgument(
                f"{count} replicas need the GPUs cuda:{first} to cuda:{end - 1}, and torch finds "
                f"no cuda:{missing[0]}: give fewer replicas",
                param="replicas",
            )
        return [replace(options, replicas=1, device=f"cuda:{number}") for number in range(first, end, ranks)]
    threads = options.threads or usable_cpus()
    return [
        replace(
            options, replicas=1, device="cpu", threads=max(1, threads // count + (number < threads % count))
        )
        for number in range(count)
    ]
