"""The text of a spec for a foreign kernel, as far as tracing its source gives it: `fusekit new --from`."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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


def trace_source(source: str, arch: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What one call of `source` gives: the name of its host function, and its run-time arguments. Runs it in a process
    of its own; BuildError names what fails there; ToolchainError where there is no compiler.
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
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise BuildError(
            f"source {source}: its process ended with {ran.returncode}, without an answer; a source returns what"
            f" cute.compile takes, and ends no process: {ran.stderr[-2000:].strip() or 'it printed nothing'}"
        ) from None
    if "error" in answer:
        raise BuildError(answer["error"])
    return answer


def main(request: str) -> None:
    """Prints the host function's name and its run-time arguments as JSON, on the last line."""
    from fusekit.compiler.hardware import answering
    from fusekit.compiler.leaves import STREAM, leaves
    from fusekit.compiler.lift import LIFT_VALUES
    from fusekit.compiler.places import with_places
    from fusekit.compiler.source_call import call_source
    from fusekit.errors import FusekitError

    wanted = json.loads(request)
    local: dict[int, tuple[str, Any]] = {}
    try:
        with answering(LIFT_VALUES[0]):
            sys.setprofile(_locals_of(wanted["source"].partition(":")[2], local))
            try:
                function, arguments, keywords = call_source(wanted["source"], wanted["params"], wanted["arch"])
            finally:
                sys.setprofile(None)
            traced = [leaf for leaf in leaves(function, arguments, keywords) if leaf.kind != STREAM]
    except FusekitError as error:
        answer: dict[str, Any] = {"error": str(with_places(error))}
    else:
        dims = _dims(traced, {key: name for key, (name, _) in local.items()})
        name = getattr(inspect.unwrap(function), "__name__", type(function).__name__)
        answer = {"function": name, "leaves": [_leaf(leaf, dims) for leaf in traced]}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def _locals_of(function: str, local: dict[int, tuple[str, Any]]) -> Callable[..., None]:
    """A profiler that notes the local variables of `function` as it returns, by the ids of their values."""

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code.co_name == function:
            local.update((id(value), (name, value)) for name, value in frame.f_locals.items())

    return profile


def _dims(traced: Sequence[Any], local: Mapping[int, str]) -> dict[int, str]:
    """The name of every open extent, by its id: its symbol, else the source's variable that holds it, else D0, D1, and
    so on.
    """
    names: dict[int, str] = {}
    taken = {leaf.name for leaf in traced}
    for leaf in traced:
        for extent in leaf.shape if leaf.kind == "tensor" else ():
            if isinstance(extent, int) or id(extent) in names:
                continue
            name = getattr(extent, "symbol", None) or local.get(id(extent), "").upper()
            if not re.fullmatch(r"[A-Za-z]\w{0,30}", name) or name in taken:
                name = next(unused for at in range(len(taken) + 1) if (unused := f"D{at}") not in taken)
            names[id(extent)] = name
            taken.add(name)
    return names


def _leaf(leaf: Any, dims: Mapping[int, str]) -> dict[str, Any]:
    """One argument. extent: the dim that an integer is, which launches read from the tensors."""
    facts = {"name": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype, "extent": dims.get(id(leaf.fake))}
    if leaf.kind != "tensor":
        return facts
    shape = [extent if isinstance(extent, int) else dims[id(extent)] for extent in leaf.shape]
    strides = [
        str(stride) if isinstance(stride, int) else dims.get(id(stride)) or _any(stride.divisibility)
        for stride in leaf.fake.stride
    ]
    return {**facts, "shape": shape, "strides": strides, "align": dsl.alignment(leaf.fake)}


def _any(step: int) -> str:
    return "any" if step == 1 else f"any multiple of {step}"


def new_extern(
    kernel: str, source: str, arch: str, params: Mapping[str, Any], answer: Mapping[str, Any], stem: str
) -> str:
    """The text of the spec file `stem` with one kernel. answer: of `trace_source`.

    Its tensors have their dtypes, ranks and fixed extents; a role that is to be filled in is "?".
    """
    lines = [
        f"# The kernel {answer['function']}, with the arguments that {source} returns.",
        "#",
        '# Fill in every "?": role = "input" is only read, "output" is written, "inout" is read and written;',
        '# "workspace" is scratch memory, with bytes = its size instead of a shape. Dims may have any names; one name',
        "# is one extent. doc and [kernel.dims], such as N = { skip_if_zero = true }, are optional.",
        "#",
        "# Check it:",
        f"#   fusekit build {stem}.toml --allow-extern   # runs {source}; proves the launch",
        f"#   fusekit run {stem}/{kernel} --check --reference MODULE:FUNCTION   # on a GPU, with a function in NumPy",
        "schema = 1",
        "",
        "[[kernel]]",
        f"name = {json.dumps(kernel)}",
        'op = "extern"',
        f"source = {json.dumps(source)}",
        f"arch = {json.dumps(arch)}",
    ]
    if params:
        lines.append(f"params = {toml_value(params)}")
    lines += ["", "[kernel.arguments]"]
    for leaf in answer["leaves"]:
        lines += _argument(leaf)
    return "\n".join(lines) + "\n"


def _argument(leaf: Mapping[str, Any]) -> list[str]:
    name, kind = toml_key(leaf["name"]), leaf["kind"]
    if kind == "tensor":
        about = f"# {leaf['dtype']}, {leaf['align']}-byte aligned, strides: {', '.join(leaf['strides'])}"
        return [about, f'{name} = {{ role = "{_UNKNOWN}", shape = {json.dumps(leaf["shape"])}, doc = "" }}']
    if kind == "pointer":
        return [
            f"# a pointer to {leaf['dtype']}, which becomes a tensor without gaps: its shape in dims and numbers",
            f'{name} = {{ role = "{_UNKNOWN}", shape = ["{_UNKNOWN}"], doc = "" }}',
        ]
    if leaf["extent"]:
        return [f"# {name} is the extent {leaf['extent']}: read from the tensors"]
    notes = [f"# {leaf['dtype']}, passed by callers; default = a number makes it optional"]
    if kind == "integer":
        notes.append('# for one that callers do not pass: value = "sm_count", or another expression')
    return [*notes, f'{name} = {{ doc = "" }}']
