"""The operands of a GEMM, one file each. The operands of a kernel decide what it does.

A file has classes of `Operand` (base.py) and `OPERANDS`, one of each. An operand declares its field of a spec file with
the rules that go with it, what a launch passes for it, its regions of shared memory, workspace and scratch memory. Its
device half has the same name, in fusekit/kernels/gemm/operands; its NumPy twin is in fusekit/reference.

An operand of another package is such an object, which an entry point of the group `fusekit.operands` leads to; its name
is the operand's, and that of its field. `device_module` and `twin` there say where its other two files are.

`words`, `refused`, `rules` and `field` are for people and for the parser: what comes of them is in a spec. So they
are no part of a kernel's key, and neither is the file of an operand that the kernel does not have.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from fusekit.errors import SpecError
from fusekit.plan import packages
from fusekit.plan.fields import Field
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Broken, Operand

__all__ = ["BACKWARD", "FORWARD", "WGRAD", "Broken", "Operand", "fields", "operands", "operands_of", "outside", "words"]

_APART = frozenset({"__init__", "base"})


@cache
def operands() -> tuple[Operand, ...]:
    """Every operand, in the order of a launch's arguments."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _APART)
    rows = [operand for name in names for operand in import_module(f"{__name__}.{name}").OPERANDS]
    taken = frozenset(operand.name for operand in rows)
    outside = packages.usable(packages.OPERANDS, lambda name: _outside(name, taken))
    rows += [_outside(name, taken) for name in outside]
    return tuple(sorted(rows, key=lambda operand: operand.order))


@cache
def _outside(name: str, taken: frozenset[str]) -> Operand:
    """The operand of another package. taken: names that fusekit's have."""
    loaded, what = packages.load(packages.OPERANDS, name), packages.what(packages.OPERANDS, name)
    if not isinstance(loaded, Operand) or loaded.name != name or loaded.field is None or loaded.field.name != name:
        raise SpecError(
            f"{what}: its entry point gives {loaded!r}; it must give an object of a class of "
            "fusekit.plan.operands.Operand, whose name and field are that of the entry point"
        )
    if name in taken or loaded.field.default is None:
        rule = (
            "a kernel has an operand of that name; name it otherwise" if name in taken else "its field has no default"
        )
        raise SpecError(f"{what}: {rule}")
    return loaded


@cache
def outside() -> frozenset[str]:
    """The names of the operands of other packages, which are their fields."""
    return frozenset(operand.name for operand in operands() if operand.outside)


@cache
def operands_of(epilogue: str) -> tuple[Operand, ...]:
    """Those that a kernel with this epilogue can have."""
    return tuple(operand for operand in operands() if epilogue in operand.epilogues)


@cache
def fields() -> tuple[Field, ...]:
    """The fields of a spec file that the operands have."""
    return tuple({operand.field.name: operand.field for operand in operands() if operand.field is not None}.values())


def words(epilogue: str) -> dict[str, str]:
    """What each argument of a kernel with this epilogue is."""
    docs = {}
    for operand in operands_of(epilogue):
        for name, what in operand.words.items():
            if "." not in name:
                docs[name] = operand.words.get(f"{epilogue}.{name}", what)
    return docs
