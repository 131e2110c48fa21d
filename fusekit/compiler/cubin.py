"""The facts of a kernel in its cubin: the parameter layout, and the resources that it takes.

The facts are in the ``.nv.info`` sections, lists of attributes. Each has a 4-byte head: format, attribute and a
16-bit value, which for the sized format is the length of the payload after it. CUDA's cuobjdump prints the same
(tests/compiler/test_cubin.py compares).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from fusekit.abi import Expr, RecordError, elf
from fusekit.errors import BuildError

RESERVED_SHARED = 1024  # of every block, from sm_80 on; counted in a kernel's section if it uses shared memory at all

_MAX_THREADS = 0x05
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_PARAMETER_BYTES = 0x19
_REGISTERS = 0x2F
_BARRIERS = 0x4C
_PARAMETER_V2 = 0x45


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """One entry of the parameter space: byte offset and size."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """One kernel of a cubin.

    registers: per thread. frame_bytes: local memory of a thread: spilled registers and arrays indexed at run time.
    static_shared: bytes that a block takes besides what the launch asks for, without the 1024 that the architecture
    reserves (as the driver counts). barriers: named barriers. max_threads: the largest block, 0 when the cubin names
    none. parameter_bytes: the parameter space.
    """

    symbol: str
    registers: int
    frame_bytes: int
    static_shared: int
    barriers: int
    max_threads: int
    parameter_bytes: int
    parameters: tuple[KernelParameter, ...]

    def resources(self, dynamic_shared: Expr) -> dict[str, Any]:
        """The entry's `resources`: JSON types only, bytes except for counts. Dynamic shared memory that the arguments
        decide counts as 0.
        """
        return {
            "registers": self.registers,
            "spill_bytes": self.frame_bytes,
            "static_shared": self.static_shared,
            "dynamic_shared": dynamic_shared if isinstance(dynamic_shared, int) else 0,
            "barriers": self.barriers,
            "max_threads": self.max_threads,
            "parameter_bytes": self.parameter_bytes,
        }


def parsed(data: bytes, what: str) -> elf.Elf:
    """The ELF file in `data`. Raises BuildError, naming `what`."""
    try:
        return elf.parse(data, what)
    except RecordError as error:
        raise BuildError(str(error)) from error


def kernels(data: bytes) -> tuple[str, ...]:
    """The symbols of the kernels in a cubin."""
    return _entry_points(parsed(data, "cubin"))


def read(data: bytes, symbol: str) -> Cubin:
    """The facts of the kernel `symbol`; raises BuildError when the cubin lacks it or describes it in an unknown way."""
    try:
        return _read(data, symbol)
    except RecordError as error:
        raise BuildError(str(error)) from error
    except struct.error as error:
        raise BuildError(f"cubin: an attribute of .nv.info is cut short ({error}); build it again") from error


def _read(data: bytes, symbol: str) -> Cubin:
    file = parsed(data, "cubin")
    known = _entry_points(file)
    if symbol not in known:
        raise BuildError(f"cubin: no kernel {symbol!r}; it has {', '.join(known) or 'none'}")
    info = file.section(f".nv.info.{symbol}")
    common = file.section(".nv.info")
    if info is None or common is None:
        raise BuildError(
            f"cubin: no .nv.info of {symbol!r}; its parameters are unknown; compile with another toolchain"
        )
    number = next(i for i, s in enumerate(file.symbols) if s.name == symbol and s.is_function)
    counts = {_REGISTERS: 0, _FRAME_SIZE: 0}
    for attribute, _, payload in elf.attributes(common.data):
        if attribute in counts and len(payload) == 8:
            function, value = struct.unpack("<II", payload)
            if function == number:
                counts[attribute] = value
    facts = {_PARAMETER_BYTES: 0, _BARRIERS: 0}
    threads = 0
    ordinals: dict[int, KernelParameter] = {}
    for attribute, value, payload in elf.attributes(info.data):
        if attribute == elf.KERNEL_PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            ordinals[ordinal] = KernelParameter(offset, packed >> 18)
        elif attribute == _PARAMETER_V2:
            raise BuildError(
                "cubin: parameters are listed in the form for spaces above 4 KiB; take fewer or smaller ones"
            )
        elif attribute in (_MAX_THREADS, _REQUIRED_THREADS) and len(payload) >= 12:
            x, y, z = struct.unpack_from("<III", payload)
            threads = x * y * z
        elif attribute == _BARRIERS:
            facts[_BARRIERS] = value & 0xFF
        elif attribute == _PARAMETER_BYTES:
            facts[_PARAMETER_BYTES] = value
    if sorted(ordinals) != list(range(len(ordinals))):
        raise BuildError(f"cubin: parameters {sorted(ordinals)} of {symbol!r}; they must be numbered without a gap")
    shared = file.section(f".nv.shared.{symbol}")
    return Cubin(
        symbol=symbol,
        registers=counts[_REGISTERS],
        frame_bytes=counts[_FRAME_SIZE],
        static_shared=max(shared.size - RESERVED_SHARED, 0) if shared is not None else 0,
        barriers=facts[_BARRIERS],
        max_threads=threads,
        parameter_bytes=facts[_PARAMETER_BYTES],
        parameters=tuple(ordinals[index] for index in range(len(ordinals))),
    )


def _entry_points(file: elf.Elf) -> tuple[str, ...]:
    return tuple(s.name for s in file.symbols if s.is_function and file.section(f".nv.info.{s.name}") is not None)
