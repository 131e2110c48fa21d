"""The caller's memory for `kept` and `scratch`, checked."""

from __future__ import annotations

from math import prod
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver
from fusekit.runtime.tensors import Slice, View, describe, read

__all__ = ["ALIGNMENT", "Slice", "required", "whole"]

ALIGNMENT = 128  # bytes, as XLA aligns its buffers; kernels need 16


def required(alignment: int | None) -> int:
    """The alignment of memory in bytes; None: that of devices."""
    return alignment or ALIGNMENT


def whole(
    tensor: Any, name: str, needed: int, device: int, driver: Driver, alignment: int | None = None
) -> int:  # fmt: skip
    """The address of memory of at least `needed` bytes. Raises ArgumentError."""
    if needed == 0:
        return 0
    if tensor is None:
        raise ArgumentError(f"{name} is missing; give {needed} bytes on device {device}", argument=name)
    address, meta = read(tensor, name, driver)
    view = describe(meta, name)
    size = DTYPES[view.dtype].bytes * prod(view.shape)
    if not view.contiguous or size < needed or view.device != device:
        raise _refused(name, address, view, needed, device, alignment)
    check_aligned(name, address, view, needed, alignment)
    return address


def check_aligned(name: str, address: int, view: View, needed: int = 0, alignment: int | None = None) -> None:
    """Raises ArgumentError for memory that is not aligned."""
    if address % required(alignment):
        raise _refused(name, address, view, needed, view.device, alignment)


def _refused(
    name: str, address: int, view: View, needed: int, device: int, alignment: int | None
) -> ArgumentError:  # fmt: skip
    size = DTYPES[view.dtype].bytes * prod(view.shape)
    return ArgumentError(
        f"{name} is {size} bytes of shape {list(view.shape)}, strides {list(view.strides)}, at {address:#x} on"
        f" device {view.device}; it must be {needed or size} contiguous bytes at a multiple of"
        f" {required(alignment)} on device {device}",
        argument=name,
    )
