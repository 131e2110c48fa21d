"""The activations of an epilogue, one file each: the name of a file is the name of the activation.

A file has `value(m, z)` and `derivative(m, z)`, which gives (value, d/dz); or, where gate and up make one output and
`GATED` is true, `value(m, gate, up, scalars)` and `derivative(m, gate, up, scalars)`: (value, d/dgate, d/dup), zero for
a clamped element. `m` is the arithmetic of whoever computes: `fusekit.kernels.gemm.maths` on the device, on float32
accumulators in registers. A file that has `approximations` maps the names of forms to (value, derivative).
`SLOPED` says that it takes the run-time scalar `alpha`. One without `derivative` has no backward activation.

The forward activation has the name of its file, the backward one a "d" before it. Nothing else in fusekit takes a name
apart: what an activation is stands in its `Kind`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

DERIVATIVE = "d"  # before the name of an activation


@dataclass(frozen=True, slots=True)
class Kind:
    """What a spec's `activation.kind` stands for. function: the forward activation, and the name of its file."""

    name: str
    function: str
    backward: bool
    gated: bool
    sloped: bool
    approximations: tuple[str, ...]

    @property
    def module(self) -> str:
        """Dotted name of its file."""
        return f"{__name__}.{self.function}"


@cache
def _names() -> frozenset[str]:
    return frozenset(path.stem for path in Path(__file__).parent.glob("*.py")) - {"__init__"}


@cache
def functions() -> tuple[str, ...]:
    """The names of the forward activations: plain ones first."""
    return tuple(sorted(_names(), key=lambda name: (_gated(name), name != "identity", name)))


def is_backward(name: Any) -> bool:
    """Whether `name` is that of a backward activation. Imports none of them."""
    return isinstance(name, str) and name not in _names() and name.removeprefix(DERIVATIVE) in _names()


def kind(name: str) -> Kind:
    """The kind of that name; KeyError for one that no file is of."""
    return kinds()[name]


@cache
def kinds() -> Mapping[str, Kind]:
    """Every kind by its name: the forward ones, then the backward ones."""
    found = {name: _kind(name, name, False) for name in functions()}
    backward = (name for name in functions() if hasattr(_module(name), "derivative") or forms(name)["none"][1])
    return found | {f"{DERIVATIVE}{name}": _kind(f"{DERIVATIVE}{name}", name, True) for name in backward}


def forms(name: str) -> Mapping[str, tuple[Callable[..., Any], Callable[..., Any] | None]]:
    """(value, derivative) of the forward activation `name`, by approximation: "none", and what else it has."""
    module = _module(name)
    found: Mapping[str, Any] = getattr(module, "approximations", None) or {
        "none": (module.value, getattr(module, "derivative", None))
    }
    return found


def _kind(name: str, function: str, backward: bool) -> Kind:
    sloped = bool(getattr(_module(function), "SLOPED", False))
    return Kind(name, function, backward, _gated(function), sloped, tuple(forms(function)))


def _gated(name: str) -> bool:
    return bool(getattr(_module(name), "GATED", False))


def _module(name: str) -> ModuleType:
    return import_module(f"{__name__}.{name}")
