"""The activations of an epilogue, one file each: the name of a file is the name of the activation.

A file has `value(m, z)` and `derivative(m, z)`, which gives (value, d/dz); or, where gate and up make one output and
`GATED` is true, `value(m, gate, up, scalars)` and `derivative(m, gate, up, scalars)`: (value, d/dgate, d/dup), zero for
a clamped element. `m` is the arithmetic to compute with: `fusekit.kernels.gemm.maths` on the device, on float32
accumulators in registers. A file that has `approximations` maps the names of forms to (value, derivative).
`SLOPED` means that it takes the run-time scalar `alpha`. One without `derivative` has no backward activation.

The forward activation has the name of its file, the backward one a "d" before it, with which no forward one begins.
Nothing else in fusekit takes a name apart: what an activation is is in its `Kind`.

An activation of another package is such a module, which an entry point of the group `fusekit.activations` leads to; its
name is the activation's. `REFERENCE` there is the dotted name of the module that defines it in NumPy
(fusekit/reference/activations).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan import packages

DERIVATIVE = "d"  # before the name of an activation
_GATED_FORMS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of a spec's `activation.kind`. function: the forward activation. module: dotted name of its file."""

    name: str
    function: str
    backward: bool
    gated: bool
    sloped: bool
    approximations: tuple[str, ...]
    module: str


@cache
def _names() -> frozenset[str]:
    return frozenset(path.stem for path in Path(__file__).parent.glob("*.py")) - {"__init__"}


@cache
def functions() -> tuple[str, ...]:
    """The names of the forward activations: fusekit's, plain ones first, then those of other packages."""
    packaged = sorted(_names(), key=lambda name: (_gated(name), name != "identity", name))
    return (*packaged, *packages.usable(packages.ACTIVATIONS, module))


def is_backward(name: Any) -> bool:
    """Whether `name` is that of a backward activation. Imports none of them."""
    return isinstance(name, str) and name.startswith(DERIVATIVE)


def kind(name: str) -> Kind:
    """The kind of that name. Raises SpecError where there is none, as on a machine without the package that has it."""
    if name not in kinds():
        raise SpecError(
            f"activation {name!r} is of no package that is installed here; install the one that the kernel was built "
            "with"
        )
    return kinds()[name]


@cache
def kinds() -> Mapping[str, Kind]:
    """Every kind by its name: the forward ones, then the backward ones."""
    table = {name: _kind(name, name, False) for name in functions()}
    backward = (name for name in functions() if hasattr(module(name), "derivative") or forms(name)["none"][1])
    return table | {f"{DERIVATIVE}{name}": _kind(f"{DERIVATIVE}{name}", name, True) for name in backward}


def no_gate(name: str) -> str:
    """Why the plain kind `name` takes no layout of gate and up, and what to write instead."""
    backward = DERIVATIVE if kind(name).backward else ""
    gated = _GATED_FORMS.get(kind(name).function)
    remedy = f"for a gated {name} write {backward}{gated}, else " if gated else ""
    return f"the activation {name} is not gated, so there is no gate to lay out; {remedy}leave it out"


def forms(name: str) -> Mapping[str, tuple[Callable[..., Any], Callable[..., Any] | None]]:
    """(value, derivative) of the forward activation `name`, by approximation: "none", and what else it has."""
    file = module(name)
    functions: Mapping[str, Any] = getattr(file, "approximations", None) or {
        "none": (file.value, getattr(file, "derivative", None))
    }
    return functions


@cache
def module(name: str) -> ModuleType:
    """The file of the forward activation `name`. Raises SpecError for one of a package that is unusable."""
    if name in _names():
        return import_module(f"{__name__}.{name}")  # before any of the same name of another package
    loaded, what = packages.load(packages.ACTIVATIONS, name), packages.what(packages.ACTIVATIONS, name)
    if not isinstance(loaded, ModuleType) or not (hasattr(loaded, "value") or hasattr(loaded, "approximations")):
        raise SpecError(f"{what}: its entry point gives {loaded!r}; it must give a module with value(m, z)")
    if is_backward(name):
        raise SpecError(f'{what}: a name that begins with "{DERIVATIVE}" is that of a derivative; name it otherwise')
    return loaded


def _kind(name: str, function: str, backward: bool) -> Kind:
    sloped = bool(getattr(module(function), "SLOPED", False))
    return Kind(name, function, backward, _gated(function), sloped, tuple(forms(function)), module(function).__name__)


def _gated(name: str) -> bool:
    return bool(getattr(module(name), "GATED", False))
