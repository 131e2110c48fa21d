"""The launch record: what a launcher needs next to the cubin, as plain data.

A cubin alone is not launchable: tensor maps, scalars and the grid are computed on the host. A `LaunchRecord` states
them as closed integer expressions (`fusekit.abi.expr`) over

- the dims of the arguments' shapes (``"M"``),
- the arguments' strides in elements (``"x.stride0"``) and device addresses (``"x.address"``, 64-bit, wrapping),
- i32 scalar arguments by their name (in schema 1 in integer parameters only),
- ``"sm_count"``, the multiprocessors of the device, and ``"cluster_margin"``, the clusters reserved for other kernels
(SM carve-out).

A launcher binds the dims from the tensors' shapes, checks what the record demands, evaluates the expressions, writes
the parameters at the offsets that the cubin prescribes, and launches. docs/launch-record.md describes it step
by step, for launchers in any language; `fusekit.runtime` is the one in Python. Nothing here knows the driver, the DSL
or NumPy.
"""

from fusekit.abi.arguments import F32_END, Argument, Dim, PeersArgument, ScalarArgument, TensorArgument, tensors_of
from fusekit.abi.events import LaunchEvent
from fusekit.abi.expr import Expr, RecordError, evaluate, evaluate_address, render, validate, variables
from fusekit.abi.floats import Truncated
from fusekit.abi.parameters import (
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorMapParameter,
    flat,
)
from fusekit.abi.record import SCHEMAS, Constraint, LaunchRecord, LaunchStep

__all__ = [
    "F32_END",
    "SCHEMAS",
    "Argument",
    "Constraint",
    "Dim",
    "Expr",
    "FloatParameter",
    "IntegerParameter",
    "LaunchEvent",
    "LaunchRecord",
    "LaunchStep",
    "Parameter",
    "PeersArgument",
    "PointerParameter",
    "RecordError",
    "ScalarArgument",
    "StructParameter",
    "TensorArgument",
    "TensorMapParameter",
    "Truncated",
    "evaluate",
    "evaluate_address",
    "flat",
    "render",
    "tensors_of",
    "validate",
    "variables",
]
