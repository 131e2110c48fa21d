"""A compile process: takes one kernel after the other from its parent, sends each back compiled and proven, or an
error.

It sees no GPU and none of the DSL's environment variables: they change what is compiled, and no key holds them. The
parent starts it with a socket to speak over, in a scratch folder that the DSL may fill.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fusekit.compiler.plan import TracePlan
from fusekit.compiler.trace import Compiled, compile_plan
from fusekit.errors import BuildError, FusekitError

_FOREIGN = ("CUTE_", "CUTLASS_")


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel. planner: a function that can be imported by name; called with `spec`. name: for messages."""

    name: str
    planner: Callable[[Any], TracePlan]
    spec: Any


@dataclass(frozen=True, slots=True)
class Done:
    """A finished job; seconds: to trace, compile and prove."""

    compiled: Compiled
    seconds: float


def serve(socket: int) -> None:
    """Works until the parent hangs up. socket: file descriptor of this end."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    connection: Connection[Any, Any] = Connection(socket)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        except Exception as error:
            connection.send(BuildError(f"a compile process cannot load its kernel: {type(error).__name__}: {error}"))
            continue
        connection.send(_work(job))


def _work(job: Job) -> Done | FusekitError:
    start = time.perf_counter()
    try:
        compiled = compile_plan(job.planner(job.spec), Path.cwd())
    except FusekitError as error:
        return error
    except Exception as error:
        failure = BuildError(f"{type(error).__name__}: {error}; this is a defect of the kernel's family module")
        failure.add_note(traceback.format_exc())
        return failure
    return Done(compiled, round(time.perf_counter() - start, 3))
