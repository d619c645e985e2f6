"""The compilers of compiling processes in tests. The constraint's source (a schema's description) is the
name of one of ``ACTIONS`` and its argument."""

from __future__ import annotations

import collections
import itertools
import json
import os
import signal

from support.holds import stand

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.constraint import Constraint

LOADER = "support.compile_loaders:compile_constraint"
LEFT_BEHIND: list[bytearray] = []


def compile_constraint(constraint: Constraint) -> CompiledConstraint:
    """The payload has the process that compiled it, unless the source wants another one."""
    command = constraint.source
    if constraint.kind == "schema":
        command = json.loads(command).get("description", "")
    name, _, argument = command.partition(" ")
    payload = ACTIONS[name](argument) if name in ACTIONS else None
    if payload is None:
        payload = str(os.getpid()).encode()
    return CompiledConstraint(f"{constraint.kind} {constraint.source}", "dfa", payload)


def _spin(_: str) -> None:
    while True:
        pass


def _spin_stubbornly(_: str) -> None:
    """Ignores exceptions, as a destructor would."""
    while True:
        try:
            _spin("")
        except BaseException:
            continue


def _spin_natively(hold: str) -> None:
    """Never returns to Python's interpreter loop, where signals are handled."""
    stand(hold)
    collections.deque(itertools.repeat(0), maxlen=0)


def _hang(_: str) -> None:
    """Not even the kernel's signal for processor time ends it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})
    _spin_natively("")


def _grow(_: str) -> None:
    hoard = []
    while True:
        hoard.append(bytearray(1_000_000))


def _recurse(depth: str) -> None:
    if depth != "0":
        _recurse(str(int(depth) - 1))


def _refuse(message: str) -> None:
    raise NotSupported(message)


def _complain(message: str) -> None:
    raise BadArgument(message)


def _fail(_: str) -> None:
    raise ZeroDivisionError


def _leave_behind(num_bytes: str) -> None:
    LEFT_BEHIND.append(bytearray(int(num_bytes)))


ACTIONS = {
    "spin": _spin,
    "stubborn": _spin_stubbornly,
    "native": _spin_natively,
    "hang": _hang,
    "allocate": lambda num_bytes: bytearray(int(num_bytes)) and None,
    "grow": _grow,
    "recurse": _recurse,
    "refuse": _refuse,
    "complain": _complain,
    "fail": _fail,
    "leave": _leave_behind,
    "abort": lambda _: os.abort(),
    "hold": stand,
    "payload": lambda num_bytes: b"x" * int(num_bytes),
    "pid": lambda _: None,
}
