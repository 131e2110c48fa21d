"""Launch records of specs, read out of the compiler's host code; not proved, so quicker than a build."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import LaunchRecord


@functools.cache
def read_record(spec: Any) -> LaunchRecord:
    """The record of `spec`, once a process. Skips the test without the DSL."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.worker import plan

    return read_plan(plan(spec))


def read_plan(plan: Any) -> LaunchRecord:
    """The record of a TracePlan."""
    from fusekit.compiler import hostcode
    from fusekit.compiler.trace import trace

    with tempfile.TemporaryDirectory() as scratch:
        traced = trace(plan, Path(scratch))
    return hostcode.read(traced.module, plan, traced.cubin)[1]
