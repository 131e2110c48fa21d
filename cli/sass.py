"""Machine code of a cubin as text, by CUDA's disassembler, where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from fusekit.errors import FusekitError, UsageError

_PACKAGE = "nvidia-cuda-nvdisasm"


def sass(cubin: bytes) -> str:
    """The instructions of every kernel in `cubin`. Raises UsageError without nvdisasm."""
    return _disassembled(cubin, "--print-code")


def counts(cubin: bytes) -> Counter[str]:
    """How many instructions of each opcode, without its modifiers, the kernels in `cubin` have. Raises UsageError
    without nvdisasm.
    """
    _, kernels = json.loads(_disassembled(cubin, "-json"))
    return Counter(
        instruction["opcode"].partition(".")[0] for kernel in kernels for instruction in kernel["sass-instructions"]
    )


def _disassembled(cubin: bytes, option: str) -> str:
    tool = shutil.which("nvdisasm") or _packaged()
    if tool is None:
        raise UsageError(
            f"instructions are read by nvdisasm, which is missing; `pip install {_PACKAGE}`, or put the bin folder of "
            "a CUDA toolkit into PATH"
        )
    with tempfile.TemporaryDirectory(prefix="fusekit-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([tool, option, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise FusekitError(f"{tool} cannot read this cubin: {reason}; it may be too old for it: update {_PACKAGE}")
    return done.stdout


def _packaged() -> str | None:
    """The disassembler of the package, which is not in PATH."""
    from importlib import metadata

    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [str(file.locate()) for file in files if file.name == "nvdisasm"]
    return paths[0] if paths else None
