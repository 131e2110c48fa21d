"""The trial of any kernel."""

from __future__ import annotations

from collections.abc import Mapping

from fusekit.bench.trial import Trial
from fusekit.errors import UsageError
from fusekit.library import Library
from fusekit.plan.operations import operation
from fusekit.runtime import Kernel


def open_trial(
    library: Library, kernel: Kernel, rows: int | None, seed: int, *, guarded: bool,
    sizes: Mapping[str, float] | None = None, reference: str | None = None,
) -> Trial:  # fmt: skip
    """Random inputs on the device, outputs poisoned. rows: of x, or a router's tokens; None: the spec's. sizes: dims
    and scalars of a kernel whose operation has no trial of its own. reference: MODULE:FUNCTION of such a kernel.
    """
    row = operation(kernel.spec["op"])
    if row is None or not (row.trial or row.alone):
        from fusekit.bench.foreign import ForeignTrial  # which no other kernel needs

        return ForeignTrial(library, kernel, rows, seed, sizes, reference)
    if sizes:
        raise UsageError(f"{kernel.name} is no foreign kernel; --rows and its spec's problem say its sizes")
    if reference is not None:
        raise UsageError(f"{kernel.name} has a reference; leave --reference out")
    if row.alone:
        raise UsageError(f"{kernel.name} {row.alone}")
    trial: Trial = row.load("trial")(library, kernel, rows, seed, guarded=guarded)
    return trial
