"""Whether builds work here: one packaged kernel is built from nothing and proven."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fusekit.compiler.build import execute, plan_build
from fusekit.compiler.identity import Identity
from fusekit.compiler.targets import select
from fusekit.errors import BuildError
from fusekit.store import Store

KERNEL = "quickstart/linear"


def self_test() -> None:
    """Builds a kernel as `fusekit build` does, with the installed CuTe DSL. Raises what keeps it from being built."""
    with tempfile.TemporaryDirectory(prefix="fusekit-check-") as folder:
        store = Store(Path(folder))
        report = execute(plan_build([*select([KERNEL])], store, Identity()), store, jobs=1)
    for row in report.failed:
        raise BuildError(f"{row.name}: {row.error}")
