"""How large a launch record may be: what every launcher takes, those in C included, whose tables have a fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusekit.abi.arguments import ScalarArgument, TensorArgument
from fusekit.abi.expr import RecordError

if TYPE_CHECKING:
    from fusekit.abi.record import LaunchRecord, LaunchStep

RANK = 8
"""The form that C reads has room for 5: a kernel with more is for Python alone."""
TENSORS = 64
"""Peers count as one for each rank."""
SCALARS = 64
LAUNCH_VARIABLES = ("sm_count", "cluster_margin", "active_clusters")
VARIABLES = 512
"""The launch variables, dims, strides, addresses, i32 scalars and values."""
CONSTRAINTS = 1024
LAUNCHES = 16
PARAMETERS = 256
THREADS = 1024
"""Of a block."""
SPACE = 32764
"""Bytes of a kernel's parameters."""
TEXT = 1 << 16
"""Bytes of a name, a symbol or a message."""
INT, WORD = 2**31 - 1, 2**63 - 1


def check_limits(record: LaunchRecord) -> None:
    """Raises RecordError, naming the field, for what is beyond these constants."""
    for where, value, unit, low, high in _sizes(record):
        if not low <= value <= high:
            raise RecordError(f"{where}: {value}{unit and ' '}{unit}; launchers take {low} to {high}")


def check_text(text: str, where: str) -> None:
    """Raises RecordError unless `text` can be handed to C: UTF-8 of at most `TEXT` bytes without a 0 byte."""
    try:
        fits = len(text.encode()) <= TEXT and "\0" not in text
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise RecordError(f"{where}: {text[:80]!a}; it is UTF-8 of at most {TEXT} bytes without a 0 byte")


def _sizes(record: LaunchRecord) -> Iterator[tuple[str, int, str, int, int]]:
    """Field, value, unit, least and most."""
    tensors = record.tensors
    variables = len(LAUNCH_VARIABLES) + len(record.dims) + len(record.values)
    variables += sum(tensor.rank + 1 for tensor in tensors) + sum(item.is_integer for item in record.scalars)
    yield "arguments", len(tensors), "tensors", 0, TENSORS
    yield "arguments", len(record.scalars), "scalars", 0, SCALARS
    yield "arguments", variables, "variables (dims, strides, addresses, integers, values)", 0, VARIABLES
    yield "constraints", len(record.constraints), "", 0, CONSTRAINTS
    yield "skip_if_zero", len(record.skip_if_zero), "dims", 0, VARIABLES
    yield "then", len(record.then), "launches", 0, LAUNCHES - 1
    for index, dim in enumerate(record.dims):
        yield f"dims[{index}].divisor", dim.divisor, "", 1, WORD
    for index, argument in enumerate(record.arguments):
        where = f"arguments[{index}]"
        if isinstance(argument, ScalarArgument):
            yield f"{where}.divisor", argument.divisor, "", 1, WORD
            continue
        yield f"{where}.alignment", argument.alignment, "bytes", 1, 1 << 30
        if isinstance(argument, TensorArgument):
            yield f"{where}.shape", argument.rank, "dims", 0, RANK
            yield f"{where}.stride_divisor", argument.stride_divisor, "", 1, WORD
    steps: tuple[LaunchRecord | LaunchStep, ...] = (record, *record.then)
    for index, step in enumerate(steps):
        where = f"then[{index - 1}]." if index else ""
        yield f"{where}parameters", len(step.parameters), "parameters", 0, PARAMETERS
        if isinstance(step.dynamic_shared, int):
            yield f"{where}dynamic_shared", step.dynamic_shared, "bytes", 0, INT
        for name, value in step.attributes.items():
            yield f"{where}attributes.{name}", value, "", -INT - 1, INT
        for number, item in enumerate(step.parameters):
            yield f"{where}parameters[{number}]", item.offset + item.size, "bytes with those before it", 0, SPACE
