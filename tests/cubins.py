"""Cubins of no code, as far as anybody looks at one before the driver does: tables, and the kernels' symbols."""

import struct


def cubin_of(*symbols: str, seed: object = "", abi: int = 7) -> bytes:
    """A whole ELF file that defines functions of these names."""
    names = "".join(f"{symbol}\0" for symbol in symbols).encode()
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
    header = b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(7)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(strings) + len(table), 0, 64, 56, 0, 64, 3, 1)
    rows = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 1, entry)
        for name, kind, offset, size, link, entry in sections
    )
    return header + strings + table + rows
