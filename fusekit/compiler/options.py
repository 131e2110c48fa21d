"""How the DSL is called: its options, and the environment that a compile process has. Both are part of every key.

The DSL, and the compilers inside it, read options, dump requests and the place of a CUDA toolkit from the environment.
So a compile process begins with what is listed here, and with nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

# Where Python and its libraries are, and whether byte code is written: without these a process may not start at all.
_KEPT = ("LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX")

OPT_LEVEL = 3
"""The optimisation level of a kernel that names none."""


LINE_INFO = "--generate-line-info"
"""The DSL's option for a cubin that says of which line of source an instruction is."""


def compile_options(arch: str, *, lineinfo: bool = False) -> str:
    """The DSL's option string, with every option of the cubin that has a default. What it dumps goes into the current
    folder: no path is among the options.
    """
    options = f"--gpu-arch={arch} --opt-level={OPT_LEVEL} --keep-cubin --dump-dir=."
    return f"{options} {LINE_INFO}" if lineinfo else options


def has_lineinfo(fields: Mapping[str, str] | None) -> bool:
    """Whether a kernel of these key fields is compiled with line information."""
    return fields is not None and LINE_INFO in fields["options"].split()


def environment(folder: Path, arch: str | None = None) -> dict[str, str]:
    """The environment of a compile process: it sees no GPU, and leaves its temporary files in `folder`.

    arch: of one that runs foreign packages, which ask for it; without it they would look for a GPU.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "TMPDIR": str(folder)} | _foreign(arch)


def variables(names: Iterable[str]) -> dict[str, str]:
    """The environment variables among `names` that are set in this process, as a spec lists them."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _foreign(arch: str | None) -> dict[str, str]:
    if arch is None:
        return {}
    return {"CUTE_DSL_ARCH": arch, "QUACK_ARCH": re.sub(r"\D", "", arch)}
