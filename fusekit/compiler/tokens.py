"""Operations that work token by token: what their kernels are traced with, and what their arguments are."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fusekit.abi import Argument, Constraint, Dim, PeersArgument, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.dtypes import DTYPES
from fusekit.plan.token_operation import (
    EXCHANGE,
    INOUT,
    OUTPUT,
    PEERS,
    ROUTER,
    SCALAR,
    Extent,
    Keys,
    TokenOperand,
    TokenOperation,
)
from fusekit.plan.tokens import TOKENS

VECTOR_BYTES = 16  # the widest access of a lane
MOST_TOKENS = 2**31 - 2**7  # a router's; token numbers of the last block stay below 2**31
MOST_ROWS = 2**31 - 2**16  # row, token and choice numbers of a last, partly empty block stay below 2**31
MOST_COLUMNS = 2**28  # of a row's bytes, an int32 with room for the last piece
MOST_GROUPS = 65536
WINDOW_ALIGNMENT = 128


def plan(spec: Any) -> TracePlan:
    """Trace plan of an operation that works token by token. Imports the DSL.

    The kernel's class sees of the spec what the key holds.
    """
    operation, interface = TOKENS[spec.op], signature(spec)
    module, _, kernel = operation.kernel.partition(":")
    scalars = {scalar.name for scalar in interface.scalars}
    names = dict.fromkeys(operand.name for operand in operation.operands if operand.name not in scalars)
    device_spec = SimpleNamespace(**spec.device_spec())
    return token_wise(getattr(import_module(module), kernel).of(device_spec), names, interface)


def signature(spec: Any) -> Signature:
    """What the callers of `spec` pass."""
    operation, keys = TOKENS[spec.op], spec.canonical()
    operands = operation.of(keys)
    shapes = [operand.extents(keys) for operand in operands]
    named = {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    written = [shape for operand, shape in zip(operands, shapes, strict=True) if operand.role in (OUTPUT, INOUT)]
    # What is written for the experts is written without tokens, too, and other ranks wait for one that has none.
    skips = written and all("T" in shape or "M" in shape for shape in written)
    return Signature(
        arch=spec.arch,
        arguments=tuple(
            _argument(operation, operand, shape, keys) for operand, shape in zip(operands, shapes, strict=True)
        ),
        dims=tuple(dim for dim in _dims(operation, keys) if dim.name in named),
        constraints=tuple(Constraint(*row) for row in operation.constraints(keys)) if operation.constraints else (),
        skip_if_zero=("T",) if skips and operation.family != EXCHANGE else (),
    )


def _aligned(operation: TokenOperation, operand: TokenOperand) -> bool:
    """Whether rows are read or written whole, in accesses of several elements."""
    return operation.family == ROUTER or (operand.shape.split()[1:] in (["X"], ["NX"]) and not operand.sparse)


def _argument(operation: TokenOperation, operand: TokenOperand, shape: tuple[Extent, ...], keys: Keys) -> Argument:
    if operand.role == PEERS:
        return PeersArgument(operand.name, keys["ranks"], operand.size(keys) if operand.size else 1, WINDOW_ALIGNMENT)
    if operand.role == SCALAR:
        return ScalarArgument(operand.name, operand.dtype, None, *(operand.bounds(keys) if operand.bounds else ()))
    return _tensor(operand.name, operand.role, operand.dtype_of(keys), shape, _aligned(operation, operand))


def _tensor(name: str, role: str, dtype: str, shape: tuple[Extent, ...], aligned: bool) -> TensorArgument:
    """aligned: rows are read in the widest accesses that their size allows, element by element otherwise."""
    size = DTYPES[dtype].bytes
    if shape[-1] == "H":
        return TensorArgument(name, role, dtype, shape, (f"{name}.stride0", 1), VECTOR_BYTES // size)
    row = size * shape[-1] if aligned and isinstance(shape[-1], int) else size
    strides = (shape[-1], 1) if len(shape) == 2 else (1,)
    return TensorArgument(name, role, dtype, shape, strides, alignment=min(VECTOR_BYTES, row & -row))


def _dims(operation: TokenOperation, keys: Keys) -> tuple[Dim, ...]:
    # Where rows have one element, a thread has a choice, and counts t K + k.
    tokens = MOST_TOKENS if operation.family == ROUTER else MOST_ROWS // (1 if operation.wide else keys["topk"] or 1)
    every = [Dim("T", maximum=tokens), Dim("M", maximum=MOST_ROWS), Dim("S", maximum=MOST_ROWS)]
    if operation.wide:
        size = DTYPES[keys["dtype"]].bytes
        divisor = VECTOR_BYTES // size
        every.append(Dim("H", divisor, divisor, MOST_COLUMNS // size))
    return (*every, Dim("E", minimum=1, maximum=MOST_GROUPS))
