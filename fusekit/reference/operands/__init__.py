"""The NumPy twins of the operands that change values, or have an output of a backward epilogue's own, by the names of
fusekit/plan/operands.

That of another package's operand is the module that its `twin` names. A twin has what it needs of five functions.
`step` is the place of its stage in the epilogue.

    inputs(means, dims, rng, seed)                        its random inputs by argument name
    factors(means, inputs)                                inputs with the factors of the product as they are multiplied
    product(means, inputs, value, error, owner, columns)  changes x . w and its error in place; owner: the rows' groups
    output(means, inputs, value, error, rows)             (value, error) after the activation, or of its gradient
    gradient(means, gradients)                            its output of a backward epilogue, from `Gradients`
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fusekit.errors import UsageError
from fusekit.plan.operands import Operand, operands
from fusekit.plan.packages import OPERANDS, package
from fusekit.reference.meaning import Meaning


@cache
def _modules() -> dict[str, ModuleType]:
    names = (path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    return {name: import_module(f"{__name__}.{name}") for name in names}


def _twin(operand: Operand) -> ModuleType | None:
    """The twin of an operand; None of one of fusekit's that changes no value."""
    if not operand.outside:
        return _modules().get(operand.name)
    if not operand.twin:
        raise UsageError(
            f"operand {operand.name}: the package {package(OPERANDS, operand.name)} gives no `twin`, which says what "
            "its results must be; run it without --check"
        )
    return import_module(operand.twin)


def twins(means: Meaning) -> list[ModuleType]:
    """The twins of a spec's operands, in the order of their stages."""
    asked = [operand for operand in operands() if means.epilogue in operand.epilogues and operand.asked(means)]
    twins = (_twin(operand) for operand in asked)
    return sorted((twin for twin in twins if twin is not None), key=lambda module: int(module.step))
