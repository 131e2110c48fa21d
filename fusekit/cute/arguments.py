"""The run-time arguments of a compilation as data, so that a launch record can be read from its entry later on."""

from __future__ import annotations

from types import MethodType
from typing import Any

from fusekit.cute.dsl import Call
from fusekit.errors import FusekitError


def written(call: Call) -> dict[str, Any]:
    """`leaves`: [name, what the trace was given for it], in order; `symbols`: of the extents in them (both in the form
    of `fusekit.compiler.fakes`). Or `why` there are none.
    """
    from fusekit.compiler.fakes import CallWriter
    from fusekit.compiler.leaves import leaves

    try:
        function: Any = call.function
        args = tuple(call["full_args"] or ())
        if args and next(iter(call["signature"].parameters), "") == "self":
            function, args = MethodType(function, args[0]), args[1:]
        traced = leaves(function, args, dict(call["full_kwargs"] or {}))
        writer = CallWriter(taken=frozenset(leaf.name for leaf in traced))
        values = [[leaf.name, writer.value(leaf.fake, leaf.name)] for leaf in traced]
    except FusekitError as error:
        return {"why": str(error)}
    except Exception as error:
        return {"why": f"its arguments cannot be recorded: {type(error).__name__}: {error}"}
    return {"leaves": values, "symbols": writer.symbols}
