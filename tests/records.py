"""Launch records of specs, read out of the compiler's host code; not proved, so quicker than a build."""

from __future__ import annotations

import functools
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fusekit.abi import LaunchRecord
from fusekit.store import key_of

FOLDERS: list[Path] = []
"""The folder that all processes of a test run share; none without the suite's conftest."""


@functools.cache
def read_record(spec: Any) -> LaunchRecord:
    """The record of `spec`, once a test run. Skips the test without the DSL."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.identity import key_fields_for
    from fusekit.compiler.worker import plan

    if not FOLDERS:
        return read_plan(plan(spec))
    kept = FOLDERS[0] / f"record-{key_of(key_fields_for(spec))}"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(read_plan(plan(spec))))
    found: LaunchRecord = pickle.loads(kept.read_bytes())
    return found


def read_plan(plan: Any) -> LaunchRecord:
    """The record of a TracePlan."""
    from fusekit.compiler import hostcode
    from fusekit.compiler.trace import trace

    with tempfile.TemporaryDirectory() as scratch:
        traced = trace(plan, Path(scratch))
    return hostcode.read(traced.module, plan, traced.cubin)[1]
