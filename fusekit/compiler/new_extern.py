"""The text of a spec for a foreign kernel, as far as tracing its source gives it: `fusekit new --from`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusekit.compiler import dsl
from fusekit.compiler.capture import toml_key, toml_value
from fusekit.compiler.foreign import search_path
from fusekit.compiler.options import environment
from fusekit.compiler.toolchain import distributions
from fusekit.errors import BuildError

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from fusekit.compiler.new_extern import main; main(sys.argv[1])"
_UNKNOWN = "?"


def new_extern(name: str, source: str, arch: str, params: Mapping[str, Any]) -> str:
    """The text of a spec of one kernel. Runs `source` in a process of its own; BuildError names what fails there;
    ToolchainError where there is no compiler.

    Its tensors have their dtypes, ranks and fixed extents; a role that is to be filled in is "?".
    """
    distributions()
    request = json.dumps({"source": source, "arch": arch, "params": dict(params)})
    with tempfile.TemporaryDirectory(prefix="fusekit-new-") as folder:
        paths = [str(Path(entry).absolute()) for entry in search_path()]
        ran = subprocess.run(
            [sys.executable, "-P", "-c", _BOOT, request, *paths], cwd=folder, capture_output=True, text=True,
            env=environment(Path(folder), arch), check=False,
        )  # fmt: skip
    try:
        answer = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise BuildError(
            f"source {source}: its process ended with {ran.returncode}, without an answer; a source returns what"
            f" cute.compile takes, and ends no process: {ran.stderr[-2000:].strip() or 'it printed nothing'}"
        ) from None
    if "error" in answer:
        raise BuildError(answer["error"])
    return _text(name, source, arch, params, answer["leaves"])


def main(request: str) -> None:
    """Prints the run-time arguments of the host function as JSON, on the last line."""
    from fusekit.compiler.hardware import answering
    from fusekit.compiler.leaves import STREAM, leaves
    from fusekit.compiler.lift import LIFT_VALUES
    from fusekit.compiler.places import with_places
    from fusekit.compiler.source_call import call_source
    from fusekit.errors import FusekitError

    wanted = json.loads(request)
    try:
        with answering(LIFT_VALUES[0]):
            traced = leaves(*call_source(wanted["source"], wanted["params"], wanted["arch"]))
    except FusekitError as error:
        answer: dict[str, Any] = {"error": str(with_places(error))}
    else:
        symbols: dict[int, str] = {}
        answer = {"leaves": [_leaf(leaf, symbols) for leaf in traced if leaf.kind != STREAM]}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def _leaf(leaf: Any, symbols: dict[int, str]) -> dict[str, Any]:
    """One argument; open extents are named D0, D1, ... as they come, the same extent the same."""
    facts = {"name": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype}
    if leaf.kind != "tensor":
        return facts
    shape = [
        extent if isinstance(extent, int) else symbols.setdefault(id(extent), f"D{len(symbols)}")
        for extent in leaf.shape
    ]
    steps = [None if isinstance(extent, int) else extent.divisibility for extent in leaf.fake.stride]
    return {**facts, "shape": shape, "steps": steps, "align": dsl.alignment(leaf.fake)}


def _text(name: str, source: str, arch: str, params: Mapping[str, Any], leaves: list[dict[str, Any]]) -> str:
    lines = [
        f'# The kernel of {source}. Each "?" cannot be read out of its code: fill it in, and name the',
        "# dims D0, D1, ... Building it runs that function: fusekit build FILE --allow-extern.",
        "schema = 1",
        "",
        "[[kernel]]",
        f"name = {json.dumps(name)}",
        'op = "extern"',
        f"source = {json.dumps(source)}",
        f"arch = {json.dumps(arch)}",
    ]
    if params:
        lines.append(f"params = {toml_value(params)}")
    lines += ["", "[kernel.arguments]"]
    for leaf in leaves:
        lines += _argument(leaf)
    return "\n".join(lines) + "\n"


def _argument(leaf: Mapping[str, Any]) -> list[str]:
    name, kind = toml_key(leaf["name"]), leaf["kind"]
    if kind == "tensor":
        steps = ", ".join("fixed" if step is None else f"free, a multiple of {step}" for step in leaf["steps"])
        about = f"# {leaf['dtype']}, {leaf['align']}-byte aligned; strides: {steps}"
        return [about, f'{name} = {{ role = "{_UNKNOWN}", shape = {json.dumps(leaf["shape"])}, doc = "" }}']
    if kind == "pointer":
        return [
            f'# a pointer to {leaf["dtype"]}: a tensor without gaps, or {{ role = "workspace", bytes = ... }}',
            f'{name} = {{ role = "{_UNKNOWN}", shape = ["{_UNKNOWN}"], doc = "" }}',
        ]
    return [
        f"# {leaf['dtype']}, given at launch; value = an expression computes an integer",
        f'{name} = {{ doc = "" }}',
    ]
