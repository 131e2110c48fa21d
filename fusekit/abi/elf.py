"""Sections and symbols of a 64-bit little-endian ELF file: what a cubin and the DSL's host object both are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusekit.abi.expr import RecordError
from fusekit.errors import IntegrityError, some

SHT_SYMTAB = 2
SHT_NOBITS = 8
KERNEL_PARAMETER = 0x17  # the attribute of .nv.info that lists one

_SIZED = 0x04  # attribute format: a payload follows the head
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True, slots=True)
class Section:
    """`size` in bytes; `data` is empty for a section that takes no room in the file."""

    name: str
    kind: int
    size: int
    link: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Symbol:
    """`section` is the index of the section that defines it, 0 for an undefined symbol."""

    name: str
    section: int
    value: int
    size: int
    is_function: bool
    is_global: bool


@dataclass(frozen=True, slots=True)
class Elf:
    flags: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    @property
    def functions(self) -> frozenset[str]:
        """Names of functions that it defines."""
        return frozenset(symbol.name for symbol in self.symbols if symbol.is_function and symbol.section)

    def parameter_count(self, symbol: str) -> int | None:
        """Parameters of the kernel `symbol` of a cubin; None where no .nv.info lists them."""
        info = self.section(f".nv.info.{symbol}")
        return None if info is None else sum(kind == KERNEL_PARAMETER for kind, _, _ in attributes(info.data))


def attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, 16-bit value, payload) of each in a .nv.info section. Raises RecordError where one is cut short."""
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack("<BBH", info[at : at + 4].ljust(4, b"\0"))
        end = at + 4 + (value if form == _SIZED else 0)
        if end > len(info):
            raise RecordError(f"cubin: attribute {attribute:#x} of .nv.info is cut short; build it again")
        yield attribute, value, info[at + 4 : end]
        at = end


def check_cubin(data: bytes, symbols: Iterable[str], name: str) -> dict[str, int | None]:
    """The `Elf.parameter_count` of each of these kernels. Raises IntegrityError, naming `name`, unless `data` is a
    whole ELF file with functions of these names: the driver is handed an address and no size.
    """
    try:
        file = parse(data, "its cubin")
        functions, counts = file.functions, {symbol: file.parameter_count(symbol) for symbol in symbols}
    except RecordError as error:
        raise IntegrityError(f"{name}: {error}") from None
    for symbol in counts:
        if symbol not in functions:
            known = some(sorted(functions)) or "none"
            raise IntegrityError(
                f"{name}: its launch record launches {symbol!r}, its cubin has {known}; build it again"
            )
    return counts


def parse(data: bytes, what: str) -> Elf:
    """The ELF file in `data`; raises RecordError, naming `what`, when it is none or a table of it lies outside."""
    try:
        return _parse(data, what)
    except (struct.error, IndexError, ValueError) as error:
        raise RecordError(
            f"{what}: {len(data)} bytes that end inside an ELF table ({error}); build it again"
        ) from error


def _parse(data: bytes, what: str) -> Elf:
    if data[:6] != b"\x7fELF\x02\x01":
        raise RecordError(
            f"{what}: begins with {data[:6].hex() or 'nothing'}; a 64-bit little-endian ELF file is expected; build it"
            " again"
        )
    header = _HEADER.unpack_from(data)
    segments, table, flags, count, names_at = header[5], header[6], header[7], header[12], header[13]
    for index in range(header[10]):
        segment = _SEGMENT.unpack_from(data, segments + index * header[9])
        if header[9] < _SEGMENT.size or segment[2] + segment[5] > len(data):
            raise ValueError(f"segment {index} ends at byte {segment[2] + segment[5]}")
    if count and header[11] < _SECTION.size:
        raise ValueError(f"rows of {header[11]} bytes")
    raw = [_SECTION.unpack_from(data, table + index * header[11]) for index in range(count)]
    names = _contents(data, raw[names_at]) if count else b""
    sections = tuple(
        Section(_text(names, entry[0]), entry[1], entry[5], entry[6], _contents(data, entry)) for entry in raw
    )
    symbols: list[Symbol] = []
    for section in sections:
        if section.kind == SHT_SYMTAB:
            strings = sections[section.link].data
            for name, info, _, index, value, size in _SYMBOL.iter_unpack(section.data):
                symbols.append(Symbol(_text(strings, name), index, value, size, info & 0xF == 2, info >> 4 != 0))
    return Elf(flags, sections, tuple(symbols))


def _contents(data: bytes, entry: tuple[int, ...]) -> bytes:
    kind, offset, size = entry[1], entry[4], entry[5]
    if kind == SHT_NOBITS:
        return b""
    if offset + size > len(data):
        raise ValueError(f"a section ends at byte {offset + size}")
    return data[offset : offset + size]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
