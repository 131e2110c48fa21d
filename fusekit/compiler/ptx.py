"""What a kernel's PTX does with the memory that its parameters point to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)(?=\.(?:entry|func)\s|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\.param[^,]*?([\w$]+)(?:\[\d*\])?\s*(?:,|$)")
_NOISE = re.compile(r"//[^\n]*|^\s*\.loc\b[^\n]*", re.MULTILINE)
_INSTRUCTION = re.compile(r"(?<![\w.$%])([a-z][\w.:]*)\s+([^;]+);")
_WORD = re.compile(r"%?[A-Za-z_$][\w$]*(?:\+\d+)?")
_ADDRESS = re.compile(r"\[([^\],]*)[^\]]*\]")  # without the coordinates in a tensor map
_POINTER = 8  # bytes

Place = tuple[int, int]
"""The number of a parameter, and an offset in it."""


class Access(NamedTuple):
    """What a kernel does with the memory behind a parameter."""

    reads: bool
    writes: bool


def accesses(ptx: str, symbol: str) -> Mapping[Place, Access]:
    """What the kernel `symbol` does with the memory that each parameter, or a part of one, points to or is a tensor map
    of.

    It follows addresses through registers, whatever the order of instructions, so it may claim too much. Raises
    ValueError where there is no such kernel, or where it passes an address to a function.
    """
    entry = next((match for match in _ENTRY.finditer(ptx) if match[1] == symbol), None)
    if entry is None:
        raise ValueError(f"there is no PTX of {symbol}")
    header, body = entry[2], entry[3]
    places = {match[1]: number for number, match in enumerate(_PARAMETER.finditer(header))}
    instructions = [(match[1], match[2]) for match in _INSTRUCTION.finditer(_NOISE.sub("", body))]
    origins: dict[str, frozenset[Place]] = defaultdict(frozenset)

    def of(text: str) -> frozenset[Place]:
        found: set[Place] = set()
        for word in _WORD.findall(text):
            name, _, shift = word.partition("+")
            found |= {(places[name], int(shift or 0))} if name in places else origins[name]
        return frozenset(found)

    changed = True
    while changed:
        changed = False
        for opcode, operands in instructions:
            target, _, rest = _split(operands)
            if not rest or not _moves_addresses(opcode):
                continue
            new = of(rest)
            for at, register in enumerate(_WORD.findall(target)):
                # A vector of parameters: the next parts of the same one.
                parts = {(number, shift + _POINTER * at) for number, shift in new} if opcode.startswith("ld") else new
                if not parts <= origins[register]:
                    origins[register] |= parts
                    changed = True
    read, written = set[Place](), set[Place]()
    for opcode, operands in instructions:
        if opcode.startswith("st.param") and of(operands.partition(",")[2]):
            raise ValueError("it passes an address to a function")
        addresses = _ADDRESS.findall(operands)
        for where, does in zip(addresses, _does(opcode, len(addresses)), strict=False):
            read |= of(where) if "r" in does else set()
            written |= of(where) if "w" in does else set()
    return {place: Access(place in read, place in written) for place in read | written}


def _moves_addresses(opcode: str) -> bool:
    """Whether the result may be an address of a parameter: of 64 bits, and of no other memory."""
    name, *parts = opcode.split(".")
    if name in ("ld", "st", "atom", "red", "ldu", "cp", "setp", "prefetch"):
        return name == "ld" and parts[:1] == ["param"]
    return "wide" in parts or parts[-1:] in (["b64"], ["s64"], ["u64"])


def _split(operands: str) -> tuple[str, str, str]:
    """The first operand, which may be a list in braces, and the rest."""
    if operands.startswith("{"):
        target, _, rest = operands.partition("}")
        return target[1:], ",", rest.lstrip(" ,")
    return operands.partition(",")


def _does(opcode: str, count: int) -> tuple[str, ...]:
    """For each address of an instruction "r", "w", "rw", or "" for memory that is not global."""
    parts = opcode.split(".")
    name = parts[0]
    if name in ("ld", "st", "atom", "red", "ldu"):
        local = {"shared", "local", "param", "const"} & {part.partition("::")[0] for part in parts}
        return ("",) if local else ({"ld": "r", "ldu": "r", "st": "w"}.get(name, "rw"),)
    if name == "multimem":
        return ("rw",)
    if name == "cp" and "async" in parts:
        spaces = [part.partition("::")[0] for part in parts if part.partition("::")[0] in ("shared", "global")]
        if spaces[:1] == ["global"]:
            return ("rw" if "reduce" in parts else "w", "")
        return ("", "r") if count > 1 else ()
    return ()
