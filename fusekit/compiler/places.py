"""Lines of sources, and keys of specs, in errors.

What Python raised while a kernel was traced, such as an IndexError, has no place: its traceback does. For a launch the
DSL gives the line where its kernel is decorated, and `fusekit.compiler.hostcode` repeats that. Every key covers
hostcode, so what a reader wants is looked up here: another text of an error must not have all kernels built again.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from fusekit.abi import RecordError
from fusekit.errors import FusekitError
from fusekit.spec import ExternSpec

_PLACE = re.compile(r"\((/[^\n]+?), line ([0-9]+)\)")
_GPU = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|no CUDA-capable|NVIDIA driver|NO_DEVICE|NoDevice|libcuda\.so", re.IGNORECASE
)
NO_GPU = (
    "; a build sees no GPU: make the arguments of make_fake_tensor, and move what needs a GPU out of the module's "
    "import and out of this function"
)
_FIELD = re.compile(r"(arguments|dims)\[[0-9]+\]\.name: |(workspace|scratch)\.bytes")


def with_places(error: FusekitError) -> FusekitError:
    """The error, in whose text the line of a decorator is that of the `def` after it; and where a kernel's source was
    when Python raised its cause. The DSL's own errors have that already.
    """
    args = [_PLACE.sub(_of_def, arg) if isinstance(arg, str) else arg for arg in error.args]
    cause = error.__cause__
    if args and cause is not None and not type(cause).__module__.startswith("cutlass"):
        remedy = (
            NO_GPU if isinstance(args[0], str) and args[0].startswith("source ") and _GPU.search(str(cause)) else ""
        )
        args[0] = f"{args[0]}{_raised_at(cause)}{remedy}"
    error.args = tuple(args)
    return error


def with_keys(error: FusekitError, spec: Any) -> FusekitError:
    """The error, in which a field of the launch record is the key of the foreign `spec` that it comes of."""
    if isinstance(error, RecordError) and isinstance(spec, ExternSpec) and (field := _FIELD.match(str(error))):
        key, remedy = f"{field[1]}: ", ""
        if memory := field[2]:
            sized = {table.get("zeroed", False): name for name, table in spec.arguments.items() if "bytes" in table}
            key = f"arguments.{sized[memory == 'workspace']}.bytes"
        elif field[1] == "arguments":
            remedy = '; say arguments.NAME.rename = "TEXT" of one'
        error.args = (f"{key}{str(error)[field.end() :]}{remedy}",)
    return error


def _raised_at(cause: BaseException) -> str:
    """The innermost line that is not the DSL's, fusekit's or the importer's, in brackets; nothing without one. A line
    of the kernel's author comes before one of an installed package.
    """
    of_dsl = getattr(sys.modules.get("cutlass"), "__path__", ())
    internal = (
        "<",
        *(f"{folder}/" for folder in (Path(__file__).parents[1], Path(importlib.__file__).parent, *of_dsl)),
    )
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith(internal)]
    authored = [frame for frame in frames if not {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}]
    frames = authored or frames
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _of_def(place: re.Match[str]) -> str:
    path, line = place[1], int(place[2])
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return place[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if decorator.lineno <= line <= (decorator.end_lineno or decorator.lineno):
                    return f"({path}, line {node.lineno})"
    return place[0]
