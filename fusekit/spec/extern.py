"""Specs of kernels that are not fusekit's: a Python function gives the host function and its fake arguments."""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fusekit.plan.arch import FOREIGN
from fusekit.plan.operations import Schema
from fusekit.spec.fields import Broken, Field
from fusekit.spec.token import NAME, SUMMARY, TokenSpec, make_spec
from fusekit.spec.values import show

EXTERN = "extern"
ROLES = ("input", "output", "inout", "workspace")
NOT_RUN = "compiled and proved, not run"
RUN = "run"
MOST_COMBINATIONS = 1024

# What an argument's table may say: field -> (types, words for them).
ARGUMENT_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "role": ((str,), f"one of {', '.join(ROLES)}"),
    "shape": ((list,), 'a list of names, integers and expressions, such as ["M", ["floordiv", "N", 2]]'),
    "strides": (
        (list,),
        'a list with "free" for a stride that the tensor says, or an expression for one that is fixed',
    ),
    "large": (
        (bool,),
        "true for a tensor that may have 2**31 elements and more although its strides are fixed or have 32 bits",
    ),
    "rename": ((str,), "a name"),
    "optional": ((bool,), "true where the trace may lack it"),
    "value": ((int, str, list), "an expression: what an integer argument is computed from"),
    "default": ((int, float), "a number: what a scalar is that a launch leaves out"),
    "minimum": ((int,), "an integer: the least value of an integer argument"),
    "maximum": ((int,), "an integer: the largest value of an integer argument"),
    "divisor": ((int,), "an integer that the values of an integer argument are multiples of"),
    "bytes": ((int, str, list), "an expression: the size of a workspace, 1 or more"),
    "zeroed": ((bool,), "true for a workspace that begins as zeros"),
    "doc": ((str,), "what it is, in a line"),
}
DIM_FIELDS = ("divisor", "minimum", "maximum", "skip_if_zero")

# What an argument's table cannot say, by what it says besides.
_OF_WORKSPACES = frozenset({"bytes", "zeroed"})
OF_CALLERS = frozenset({"default", "minimum", "maximum", "divisor"})  # of an integer that they pass
_OF_TENSORS = frozenset({"shape", "strides", "large"})

_LISTS = ("distributions", "files", "env", "ran_on")
_SOURCE = re.compile(r"\w+(\.\w+)*:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_]\w{0,63}")

EXTERN_FIELDS = (
    NAME,
    SUMMARY,
    Field("arch", "choice", "Target architecture.", choices=FOREIGN, required=True, sweep=True),
    Field("source", "string",
        'A function, "module:function", that returns what cute.compile takes: (function, args) or '
        "(function, args, kwargs), with fake arguments. It is called with params, and with arch if it takes that.",
        required=True),
    Field("params", "json", "Its keyword arguments: JSON values; a list is a value.", default={}),
    Field("sweep", "combinations", "Params of which each combination is a kernel: name -> list of values.", default={},
        sweep=True),
    Field("lift", "json", "Integer arguments that no cubin depends on, computed at launch: name -> expression.",
        default={}),
    Field("arguments", "json", "Of each argument of the host function what its code cannot tell; for a tensor role and "
        "shape.", default={}),
    Field("dims", "json", "Bounds of dims: name -> { divisor, minimum, maximum, skip_if_zero }.", default={}),
    Field("distributions", "strings", "Installed distributions whose code the source calls; those that its module "
        "imports are found without.", default=()),
    Field("files", "strings", "Files that the source reads while it is built, by their paths from the folder that its "
        "package or module is in.", default=()),
    Field("env", "strings", "Environment variables that the source reads while it is built; it has no others.",
        default=()),
    Field("ran_on", "strings", f'Architectures that it was run on; entries of another say "{NOT_RUN}".', default=()),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExternSpec(TokenSpec):
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin.

    params: all keyword arguments of the source, with the sweep's choice; sweep: the choice alone.
    """

    file: str
    kernel: str
    op: str
    arch: str
    source: str
    params: dict[str, Any] = field(hash=False)
    sweep: dict[str, Any] = field(hash=False)
    lift: dict[str, Any] = field(hash=False)
    arguments: dict[str, dict[str, Any]] = field(hash=False)
    dims: dict[str, dict[str, Any]] = field(hash=False)
    distributions: tuple[str, ...]
    files: tuple[str, ...]
    env: tuple[str, ...]
    ran_on: tuple[str, ...]
    summary: str

    @property
    def variant(self) -> str:
        """The sweep's choice, such as `n4096-dtype-bf16`; `base` without one."""
        return variant_of(self.sweep)

    def canonical(self) -> dict[str, Any]:
        """The whole spec in JSON types, fields sorted; `status` says whether it was run on this architecture."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {field: list(values[field]) for field in _LISTS}
        values["status"] = RUN if self.arch in self.ran_on else NOT_RUN
        return dict(sorted(values.items()))

    def device_spec(self) -> dict[str, Any]:
        """The fields that decide the cubin and its launch record, in JSON types, without names and texts."""
        apart = ("file", "kernel", "summary", "sweep", "ran_on", "status")
        spec = {field: value for field, value in self.canonical().items() if field not in apart}
        arguments = {
            name: {field: table[field] for field in table if field != "doc"} for name, table in self.arguments.items()
        }
        return spec | {"arguments": arguments}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> ExternSpec:
    """The spec of one kernel. values: by field, complete; choice: what the sweep takes."""
    lists = {field: tuple(values[field]) for field in _LISTS}
    return make_spec(ExternSpec, file, values, choice, params={**values["params"], **choice["sweep"]}, **lists)


def broken_extern_rules(spec: ExternSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be traced."""
    refusals: list[Broken] = []
    if not _SOURCE.fullmatch(spec.source):
        rule = 'must name a function as "package.module:function"'
        refusals.append(("source", spec.source, rule))
    for label in ("params", "lift"):
        for name in getattr(spec, label):
            if not _NAME.fullmatch(name):
                refusals.append(
                    (f"{label}.{name}", getattr(spec, label)[name], "must be named as a Python argument is")
                )
    for file in spec.files:
        if not file or file.startswith("/") or "\\" in file or {"", ".", ".."} & {*file.split("/")}:
            rule = "must be a file's path from the folder that the source's package or module is in, such as table.json"
            refusals.append(("files", file, rule))
    refusals += [("env", name, "must be a variable's name") for name in spec.env if not _NAME.fullmatch(name)]
    for arch in spec.ran_on:
        if arch not in FOREIGN:
            refusals.append(("ran_on", arch, f"must be of {', '.join(FOREIGN)}"))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", spec.variant):
        rule = (
            f"makes the variant's name {show(spec.variant)}, which must be at most 100 letters, digits, '.', '_', '-'"
        )
        refusals.append(("sweep", spec.sweep, rule))
    return [*refusals, *_lift(spec), *_arguments(spec), *_dims(spec)]


SCHEMA = Schema(EXTERN_FIELDS, ("arch", "sweep"), make, broken_extern_rules)


def _lift(spec: ExternSpec) -> list[Broken]:
    return [
        (f"lift.{name}", value, "must be an expression, a list that begins with its operator, or a variable's name")
        for name, value in spec.lift.items()
        if not _is_expression(value)
    ]


def _arguments(spec: ExternSpec) -> list[Broken]:
    refusals: list[Broken] = []
    for name, table in spec.arguments.items():
        where = f"arguments.{name}"
        if not isinstance(table, dict):
            refusals.append((where, table, 'must be a table, such as { role = "input", shape = ["M", "N"] }'))
            continue
        for label, value in table.items():
            rule = _broken(label, value)
            if rule:
                refusals.append((f"{where}.{label}", value, rule))
        if table.get("role") == "workspace" and "bytes" not in table:
            refusals.append((where, table, "a workspace needs its size; say bytes = an integer or an expression"))
        refusals += [(f"{where}.{label}", table[label], rule) for label, rule in _meaningless(table)]
        if not any(refusal[0].startswith(f"{where}.") for refusal in refusals):
            refusals += _bounds(where, table)
    return refusals


def _meaningless(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, rule) of fields that mean nothing with the table's other fields."""
    role = table.get("role")
    if role == "workspace":
        odd, words = (
            _OF_TENSORS - {"shape", "strides"} | OF_CALLERS | {"value"},
            "says nothing of a workspace; leave it out",
        )
    elif role is not None:
        odd, words = _OF_WORKSPACES | OF_CALLERS | {"value"}, f'says nothing of a tensor with role = "{role}"'
    elif "value" in table:
        odd, words = _OF_TENSORS | _OF_WORKSPACES | OF_CALLERS, "says nothing of an integer that is computed (value)"
    else:
        odd, words = _OF_WORKSPACES, 'is of a workspace; say role = "workspace"'
    return [(label, words) for label in table if label in odd]


def _bounds(where: str, table: Mapping[str, Any]) -> list[Broken]:
    """Rules of numbers: divisor, minimum, maximum, and the default among them."""
    least, most, step = table.get("minimum"), table.get("maximum"), table.get("divisor")
    if step is not None and step < 1:
        return [(f"{where}.divisor", step, "must be 1 or more")]
    if least is not None and most is not None and least > most:
        return [(f"{where}.minimum", least, f"must be at most the maximum, which is {most}")]
    value = table.get("default")
    if value is None or (
        (least is None or value >= least) and (most is None or value <= most) and (step is None or value % step == 0)
    ):
        return []
    return [(f"{where}.default", value, "must be within the argument's own minimum, maximum and divisor")]


def _broken(label: str, value: Any) -> str:
    """The rule that one entry of an argument's table breaks."""
    if label not in ARGUMENT_FIELDS:
        return f"there is no such field; the fields are {', '.join(ARGUMENT_FIELDS)}"
    types, words = ARGUMENT_FIELDS[label]
    right = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if right and label == "role":
        right = value in ROLES
    elif right and label in ("value", "bytes"):
        right = _is_expression(value) and not (label == "bytes" and isinstance(value, int) and value < 1)
    elif right and label in ("shape", "strides"):
        right = all(_is_expression(item) for item in value)
    elif right and label == "rename":
        right = _NAME.fullmatch(value) is not None
    return "" if right else f"must be {words}"


def _dims(spec: ExternSpec) -> list[Broken]:
    refusals: list[Broken] = []
    for name, table in spec.dims.items():
        if not isinstance(table, dict):
            refusals.append((f"dims.{name}", table, "must be a table, such as { divisor = 8, maximum = 65536 }"))
            continue
        for label, value in table.items():
            wanted = bool if label == "skip_if_zero" else int
            if label not in DIM_FIELDS:
                rule = f"there is no such field; the fields are {', '.join(DIM_FIELDS)}"
                refusals.append((f"dims.{name}.{label}", value, rule))
            elif type(value) is not wanted or (wanted is int and not 0 <= value < 2**63):
                words = "true or false" if wanted is bool else "an integer from 0"
                refusals.append((f"dims.{name}.{label}", value, f"must be {words}"))
        if not any(refusal[0].startswith(f"dims.{name}.") for refusal in refusals):
            refusals += _bounds(f"dims.{name}", table)
    return refusals


def _is_expression(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) >= 2 and isinstance(value[0], str) and all(_is_expression(item) for item in value[1:])
    return isinstance(value, int | str) and not isinstance(value, bool)


def is_json(value: Any) -> bool:
    """Whether a TOML value has an exact JSON form: dates, times, infinities have none."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def combinations(sweep: Mapping[str, list[Any]]) -> tuple[dict[str, Any], ...]:
    """Every choice of one value for each name."""
    return tuple(dict(zip(sweep, choice, strict=True)) for choice in itertools.product(*sweep.values()))


def variant_of(choice: Mapping[str, Any]) -> str:
    """The name of a choice of a sweep."""
    return "-".join(_given_as(name, value) for name, value in choice.items()) or "base"


def _given_as(name: str, value: Any) -> str:
    text = name.replace("_", "")
    if isinstance(value, bool):
        return text if value else f"no{text}"
    if isinstance(value, int) and value >= 0:
        return f"{text}{value}"
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return text + "x".join(map(str, value))
    words = json.dumps(value) if not isinstance(value, str) else value
    return f"{text}-" + (re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-") or "none")
