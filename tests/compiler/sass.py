"""What the machine code of a cubin does, through CUDA's own disassembler.

nvdisasm and cuobjdump come with the packages nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump (extra `test`); neither
needs a GPU.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from fusekit.errors import BuildError, ToolchainError


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: ``Instruction("HGMMA.64x128x16.F32.BF16", "R24,gdesc[UR8],...", "@P0")``."""

    opcode: str
    operands: str
    predicate: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers: ``HGMMA``."""
        return self.opcode.partition(".")[0]


@cache
def instructions(cubin: bytes, symbol: str) -> tuple[Instruction, ...]:
    """The instructions of the kernel `symbol`, in order of address. Half a second a cubin, so each is read once."""
    document = json.loads(run_tool("nvdisasm", "-json", cubin))
    for function in document[1]:
        if function["function-name"] == symbol:
            return tuple(
                Instruction(entry["opcode"], entry.get("operands", ""), entry.get("predicate", ""))
                for entry in function["sass-instructions"]
            )
    names = ", ".join(function["function-name"] for function in document[1])
    raise BuildError(f"nvdisasm: no kernel {symbol!r}; the cubin has {names or 'none'}")


def counts(code: Iterable[Instruction]) -> Counter[str]:
    """How often each opcode is used, without modifiers: ``counts(code)["STL"]`` are stores of spilled registers."""
    return Counter(instruction.base for instruction in code)


def run_tool(name: str, option: str, cubin: bytes) -> str:
    """The output of ``nvdisasm`` or ``cuobjdump`` with one option on a cubin; ToolchainError without the tool."""
    with tempfile.TemporaryDirectory(prefix="fusekit-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        result = subprocess.run([str(_tool(name)), option, str(file)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{name} {option} failed with exit code {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _tool(name: str) -> Path:
    package = f"nvidia-cuda-{name}"
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        path = Path(str(entry.locate()))
        if entry.name == name and path.is_file():
            return path
    raise ToolchainError(f"{name} is not installed; reading machine code needs it; pip install {package}")
