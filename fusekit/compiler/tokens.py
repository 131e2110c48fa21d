"""Operations that work token by token: what their kernels are traced with, and what their arguments are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fusekit.abi import Dim, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.dtypes import DTYPES

VECTOR_BYTES = 16  # the widest access of a lane
MOST_TOKENS = 2**31 - 2**7  # a router's; token numbers of the last block stay below 2**31
MOST_ROWS = 2**31 - 2**16  # row, token and choice numbers of a last, partly empty block stay below 2**31
MOST_COLUMNS = 2**28  # of a row's bytes, an int32 with room for the last piece
MOST_GROUPS = 65536


def plan(spec: Any) -> TracePlan:
    """Trace plan of an operation that works token by token. Imports the DSL.

    The kernel's class sees of the spec what the key holds.
    """
    made, keys = signature(spec), spec.device_spec()
    module, _, kernel = keys["operation"]["class"].partition(":")
    scalars = {scalar.name for scalar in made.scalars}
    names = dict.fromkeys(each["name"] for each in keys["operation"]["operands"] if each["name"] not in scalars)
    return token_wise(getattr(import_module(module), kernel).of(SimpleNamespace(**keys)), names, made)


def signature(spec: Any) -> Signature:
    """What the callers of `spec` pass."""
    keys = spec.device_spec()
    routes = keys["operation"]["family"] == "router"
    operands = [each for each in keys["operation"]["operands"] if "role" in each]
    shapes = [each["shape"] for each in operands]
    named = {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    written = [each["shape"] for each in operands if each["role"] == "output"]
    return Signature(
        arch=spec.arch,
        arguments=tuple(
            ScalarArgument(each["name"], each["dtype"]) if each["role"] == "scalar" else _tensor(**each, aligned=routes)
            for each in operands
        ),
        dims=tuple(dim for dim in _dims(keys, routes, "H" in named) if dim.name in named),
        # What is written for the experts is written without tokens, too.
        skip_if_zero=("T",) if written and all(shape[0] in ("T", "M") for shape in written) else (),
    )


def _tensor(name: str, role: str, dtype: str, shape: list[Any], aligned: bool) -> TensorArgument:
    """aligned: rows are read in the widest accesses that their size allows, element by element otherwise."""
    size = DTYPES[dtype].bytes
    if shape[-1] == "H":
        return TensorArgument(name, role, dtype, tuple(shape), (f"{name}.stride0", 1), VECTOR_BYTES // size)
    row = size * shape[-1] if aligned and isinstance(shape[-1], int) else size
    strides = (shape[-1], 1) if len(shape) == 2 else (1,)
    return TensorArgument(name, role, dtype, tuple(shape), strides, alignment=min(VECTOR_BYTES, row & -row))


def _dims(keys: Mapping[str, Any], routes: bool, wide: bool) -> tuple[Dim, ...]:
    # Where rows have one element, a thread has a choice, and counts t K + k.
    tokens = MOST_TOKENS if routes else MOST_ROWS // (1 if wide else keys["topk"] or 1)
    every = [Dim("T", maximum=tokens), Dim("M", maximum=MOST_ROWS)]
    if wide:
        size = DTYPES[keys["dtype"]].bytes
        divisor = VECTOR_BYTES // size
        every.append(Dim("H", divisor, divisor, MOST_COLUMNS // size))
    return (*every, Dim("E", minimum=1, maximum=MOST_GROUPS))
