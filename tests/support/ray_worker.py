"""Starts a worker of Ray, in place of Ray's own script, which imports Ray before the worker does so again.
For workers without a runtime environment."""

import os
import sys

LEFT_OUT = ("--serialized-runtime-env-context", "--language")
os.execv(sys.executable, [sys.executable, *[word for word in sys.argv[1:] if not word.startswith(LEFT_OUT)]])
