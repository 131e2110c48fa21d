"""The text of a spec for a foreign kernel, as far as its source and its compiled code give it: `fusekit new --from`."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
import textwrap
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
_ROLES = {(True, False): "input", (False, True): "output", (True, True): "inout"}
_USES = {"input": "the kernel reads it", "output": "the kernel writes it", "inout": "the kernel reads and writes it"}
_NAMES = {
    "input": re.compile(r"x|a|b|w|weights?|q|k|v|(?:.*_)?(?:in|inputs?|src|bias|residual)", re.IGNORECASE),
    "output": re.compile(r"y|out|o|(?:.*_)?(?:outputs?|dst|results?)|out_.*", re.IGNORECASE),
}


def trace_source(source: str, arch: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What one call of `source` gives: the name of its host function, and its run-time arguments, with the roles that
    the compiled kernels give them. Runs it in a process of its own; BuildError names what fails there; ToolchainError
    where there is no compiler.
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
        roles, why = _roles(wanted, answer)
        answer |= {"why": why, "leaves": [{**leaf, "role": roles.get(leaf["name"])} for leaf in answer["leaves"]]}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def _roles(wanted: Mapping[str, Any], answer: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """What the kernels do with each tensor: only read, only write, or both; and why nothing is known of one."""
    from fusekit.abi import PointerParameter, StructParameter, TensorMapParameter
    from fusekit.compiler import extern, hardware, hostcode
    from fusekit.compiler.lift import LIFT_VALUES
    from fusekit.compiler.places import with_places
    from fusekit.compiler.ptx import accesses
    from fusekit.compiler.trace import trace
    from fusekit.errors import FusekitError
    from fusekit.spec import ExternSpec, parse_text

    leaves = [{**leaf, "role": "inout"} for leaf in answer["leaves"]]
    for at, leaf in enumerate(leaves):
        if leaf["kind"] == "pointer":
            leaf["shape"] = [f"UNKNOWN_{at}"]
    complete = {**answer, "leaves": leaves, "why": ""}
    uses: dict[str, tuple[bool, bool]] = {}
    try:
        (spec,) = parse_text(
            new_extern("kernel", wanted["source"], wanted["arch"], wanted["params"], complete, "k"), "k"
        )
        assert isinstance(spec, ExternSpec)
        plan = extern.plan(spec).with_option("--keep-ptx")
        with hardware.answering(LIFT_VALUES[0], plan.asked):
            traced = trace(plan, Path.cwd())
            _, record = hostcode.read(traced.module, plan, traced.cubin)
        for launch in record.launches:
            found = accesses(traced.ptx, launch.symbol)
            for number, parameter in enumerate(launch.parameters):
                fields = parameter.fields if isinstance(parameter, StructParameter) else (parameter,)
                for field in fields:
                    if isinstance(field, PointerParameter | TensorMapParameter):
                        at = 0 if field is parameter else field.offset
                        access = found.get((number, at), (False, False))
                        before = uses.get(field.argument, (False, False))
                        uses[field.argument] = before[0] or access[0], before[1] or access[1]
    except FusekitError as error:
        return {}, " ".join(str(with_places(error)).split())
    except ValueError as error:
        return {}, str(error)
    return {name: _ROLES[use] for name, use in uses.items() if use in _ROLES}, ""


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

    Its tensors have their dtypes, ranks and fixed extents, and the role that the compiled kernel gives them, or their
    name; a role that neither gives is "?".
    """
    roles = [role_of(leaf) for leaf in answer["leaves"] if leaf["kind"] in ("tensor", "pointer")]
    unknown = "?" in [role for role, _ in roles] or any(leaf["kind"] == "pointer" for leaf in answer["leaves"])
    compiled = f"The kernel could not be compiled to see its roles: {answer['why']}" if answer["why"] else ""
    lines = [
        f"# The kernel {answer['function']}, with the arguments that {source} returns.",
        "#",
        *textwrap.wrap(compiled, 116, initial_indent="# ", subsequent_indent="# "),
        "# Check the roles" + (', and fill in every "?":' if unknown else ":"),
        '# "input" is only read, "output" is written, "inout" is read and written; "workspace" is scratch memory,',
        "# with bytes = its size instead of a shape. Dims may have any names; one name is one extent.",
        "# doc and [kernel.dims], such as N = { skip_if_zero = true }, are optional.",
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


def role_of(leaf: Mapping[str, Any]) -> tuple[str, str]:
    """The role of a tensor, "?" if nothing gives it, and where it comes from. leaf: of `trace_source`."""
    if leaf["role"]:
        return leaf["role"], _USES[leaf["role"]]
    named = (role for role, names in _NAMES.items() if names.fullmatch(leaf["name"]))
    role = next(named, _UNKNOWN)
    return role, "its role is unknown" if role == _UNKNOWN else "its role is guessed from its name"


def _argument(leaf: Mapping[str, Any]) -> list[str]:
    name, kind = toml_key(leaf["name"]), leaf["kind"]
    if kind in ("tensor", "pointer"):
        role, origin = role_of(leaf)
    if kind == "tensor":
        about = f"# {leaf['dtype']}, {leaf['align']}-byte aligned, strides: {', '.join(leaf['strides'])}; {origin}"
        return [about, f'{name} = {{ role = "{role}", shape = {json.dumps(leaf["shape"])}, doc = "" }}']
    if kind == "pointer":
        shape = leaf.get("shape", [_UNKNOWN])
        return [
            f"# a pointer to {leaf['dtype']}, which becomes a tensor without gaps: its shape in dims and numbers;",
            f"# {origin}",
            f'{name} = {{ role = "{role}", shape = {json.dumps(shape)}, doc = "" }}',
        ]
    if leaf["extent"]:
        return [f"# {name} is the extent {leaf['extent']}: read from the tensors"]
    if kind == "event":
        return ["# the handle of an event, passed by callers", f'{name} = {{ doc = "" }}']
    notes = [f"# {leaf['dtype']}, passed by callers; default = a number makes it optional"]
    if kind == "integer":
        notes.append('# for one that callers do not pass: value = "sm_count", or another expression')
    return [*notes, f'{name} = {{ doc = "" }}']
