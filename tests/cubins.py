"""Cubins of no code, as far as anybody looks at one before the driver does: tables, and the kernels' symbols."""

import struct
from collections.abc import Mapping


def cubin_of(*symbols: str, seed: object = "", abi: int = 7, parameters: Mapping[str, int] | None = None) -> bytes:
    """A whole ELF file that defines functions of these names. parameters: how many its .nv.info lists, by symbol."""
    infos = {
        f".nv.info.{symbol}": bytes.fromhex("04170c00" + 12 * "00") * n for symbol, n in (parameters or {}).items()
    }
    names = "".join(f"{name}\0" for name in (*symbols, *infos)).encode()
    strings = b"\0.shstrtab\0.symtab\0" + names + str(seed).encode() + b"\0"
    table, at = bytes(24), strings.index(b".symtab\0") + 8
    for symbol in symbols:
        table += struct.pack("<IBBHQQ", at, 0x12, 0, 1, 0, 0)
        at += len(symbol.encode()) + 1
    sections = [
        (0, 0, 0, 0, 0, 0),
        (1, 3, 64, len(strings), 0, 0),
        (11, 2, 64 + len(strings), len(table), 1, 24),
    ]
    contents = strings + table
    for name, info in infos.items():
        sections.append((strings.index(name.encode()), 0x70000000, 64 + len(contents), len(info), 0, 0))
        contents += info
    header = b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(7)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(contents), 0, 64, 56, 0, 64, len(sections), 1)
    rows = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 1, entry)
        for name, kind, offset, size, link, entry in sections
    )
    return header + contents + rows
