"""The trial of any kernel."""

from __future__ import annotations

from collections.abc import Mapping

from fusekit.bench.quantise_trial import QuantiseTrial
from fusekit.bench.token_trial import TokenTrial
from fusekit.bench.trial import Trial
from fusekit.errors import UsageError
from fusekit.library import Library
from fusekit.plan.operations import EXTERN, OPERATIONS, QUANTISE
from fusekit.plan.token_operation import CHECK, EXCHANGE
from fusekit.runtime import Kernel


def open_trial(
    library: Library, kernel: Kernel, rows: int | None, seed: int, *, guarded: bool,
    sizes: Mapping[str, float] | None = None,
) -> Trial:  # fmt: skip
    """Made-up inputs on the device, outputs poisoned. rows: of x, or a router's tokens; None: the spec's. sizes: dims
    and scalars of a foreign kernel.
    """
    operation = OPERATIONS[kernel.spec["op"]]
    if operation.family == EXTERN:
        from fusekit.bench.foreign import ForeignTrial  # which no other kernel needs

        return ForeignTrial(library, kernel, rows, seed, sizes)
    if sizes:
        raise UsageError(f"{kernel.name} is no foreign kernel; --rows and its spec's problem say its sizes")
    if operation.family == CHECK:
        raise UsageError(
            f"{kernel.name} launches beside other kernels and has no trial; open_library(checked=True) uses it"
        )
    if operation.family == EXCHANGE:
        raise UsageError(
            f"{kernel.name} is launched by all ranks together and has no trial on one device; fusekit.exchange makes "
            "the windows that it needs"
        )
    if operation.family == QUANTISE:
        return QuantiseTrial(library, kernel, rows, seed)
    if operation.token_wise:
        return TokenTrial(library, kernel, rows, seed)
    return Trial(library, kernel, rows, seed, guarded=guarded)
