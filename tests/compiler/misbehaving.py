"""Planners for the tests of compile processes. A process imports them by name."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import tilecopy


def good(spec):
    return tilecopy.plan(spec)


def dies(spec):
    sys.stderr.write("a last word\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(spec):
    os._exit(7)


def defective(spec):
    return [][1]


def hangs(spec):
    Path(spec, "hanging").write_text(str(os.getpid()))
    time.sleep(1000)


def tells(spec):
    """Gives away where it runs, in the one way it has."""
    raise ValueError(f"{json.dumps(dict(os.environ), sort_keys=True)} {Path.cwd()}")


def tells_its_process(spec):
    raise ValueError(f"process {os.getpid()}")


def greedy(spec):
    return bytearray(4 << 30)


def some_die(spec):
    if spec.kernel == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return tilecopy.plan(spec)
