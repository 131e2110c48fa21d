"""Windows (IPC buffers of ranks) as arguments of a launch: for each rank an address, or a tensor on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fusekit.abi import LaunchRecord, PeersArgument, evaluate
from fusekit.abi.arguments import PEER
from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver
from fusekit.runtime.tensors import View, compact_strides, describe, read

_UNKNOWN = -1
_ANYWHERE = View("u8", (), (), -1)


@dataclass(frozen=True, slots=True)
class Peer:
    """One window, as launches read a tensor. shape: its bytes, -1 for an address alone."""

    address: int
    shape: tuple[int]
    dtype: str = "u8"
    device: int = -1  # any: a peer's memory is on another device

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int]:
        return (1,)


def spread(record: LaunchRecord, arguments: Mapping[str, Any], driver: Driver, kernel: str) -> dict[str, Any]:
    """`arguments` with one argument for each window instead of peers. Raises ArgumentError for a wrong number."""
    expanded = dict(arguments)
    for argument in record.peers:
        if argument.name in expanded:
            given = _given(argument, expanded.pop(argument.name), kernel)
            for tensor, window in zip(argument.tensors, given, strict=True):
                expanded[tensor.name] = _peer(window, tensor.name, driver)
    return expanded


def _given(argument: PeersArgument, value: Any, kernel: str) -> Sequence[Any]:
    rule = f"{kernel} is for {argument.count} ranks; give the window of each, in the order of ranks"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ArgumentError(f"{argument.name} is a {type(value).__name__}; {rule}", argument=argument.name)
    if len(value) != argument.count:
        raise ArgumentError(f"{argument.name} has {len(value)} windows; {rule}", argument=argument.name)
    return value


def _peer(window: Any, name: str, driver: Driver) -> Peer:
    if isinstance(window, int) and not isinstance(window, bool):
        if not 0 <= window < 2**64:
            raise ArgumentError(f"{name} is {window}; it must be an address of 64 bits", argument=name)
        return Peer(window, (_UNKNOWN,))
    address, meta = read(window, name, driver)
    view = describe(meta, name)
    if view.strides != compact_strides(view.shape):
        raise ArgumentError(f"{name} has strides {list(view.strides)}; a window must be contiguous", argument=name)
    return Peer(address, (prod(view.shape) * DTYPES[view.dtype].bytes,))


def check_windows(record: LaunchRecord, views: Sequence[View], values: Mapping[str, int]) -> None:
    """Raises ArgumentError for a window that is too small. values: dims and i32 scalars."""
    sizes = {tensor.name: view.shape for tensor, view in zip(record.tensors, views, strict=True)}
    for argument in record.peers:
        needed = evaluate(argument.bytes, values)
        for tensor in argument.tensors:
            (size,) = sizes[tensor.name]
            if _UNKNOWN < size < needed:
                raise ArgumentError(
                    f"{tensor.name} has {size} bytes; it must have at least {needed}", argument=argument.name
                )


def placed(record: LaunchRecord, views: Sequence[View]) -> list[View]:
    """The views as `bind` takes them: a window is an address, of no device in particular."""
    return [_ANYWHERE if tensor.role == PEER else view for tensor, view in zip(record.tensors, views, strict=True)]
