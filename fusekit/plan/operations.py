"""The operations as rows of facts: what is known of one by its name is a field here.

An operation of another package is an entry point of the group `fusekit.operations`: its name is the operation's, and
it leads to a `fusekit.spec.family.Family`. The entry points are read when a spec asks for an operation that has no row
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan.token_operation import CHECK, EXCHANGE, PERMUTATION, ROUTER
from fusekit.plan.tokens import TOKENS

GROUP = "fusekit.operations"

GEMM, QUANTISE, EXTERN = "gemm", "quantise", "extern"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. planner: the module of the compiler that builds it; kernel: MODULE:CLASS, "" where it plans that.

    Of a GEMM: tiles: the dims along which a tile's M and N lie; reduction: the dim that is summed over; ragged: the dim
    of which each of E groups has a part, "" where there are none.

    Of one that works token by token: wide: rows have H elements; long_row: experts from which on 4 warps a block are
    better than 8, 0 for never.
    """

    name: str
    family: str
    planner: str
    kernel: str = ""
    tiles: tuple[str, str] | None = None
    reduction: str = ""
    ragged: str = ""
    wide: bool = False
    long_row: int = 0

    @property
    def token_wise(self) -> bool:
        """Whether the rows of its problem are tokens, T."""
        return self.family in (ROUTER, PERMUTATION, EXCHANGE, CHECK)

    @property
    def reduces_rows(self) -> bool:
        """Whether the sum is over rows, as in a weight gradient."""
        return self.reduction == "M"


OPERATIONS = {
    row.name: row
    for row in (
        Operation("dense-gemm", GEMM, "fusekit.compiler.gemm", "", ("M", "N"), "K"),
        Operation("grouped-gemm", GEMM, "fusekit.compiler.gemm", "", ("M", "N"), "K", "M"),
        Operation("dense-wgrad", GEMM, "fusekit.compiler.gemm", "", ("N", "K"), "M"),
        Operation("grouped-wgrad", GEMM, "fusekit.compiler.gemm", "", ("N", "K"), "M", "M"),
        *(
            Operation(each.name, each.family, "fusekit.compiler.tokens", each.kernel, wide=each.wide,
                      long_row=each.long_row)
            for each in TOKENS.values()
        ),
        Operation("quantise", QUANTISE, "fusekit.compiler.quantise"),
        Operation("extern", EXTERN, "fusekit.compiler.extern"),
    )
}  # fmt: skip


def provided(name: str) -> Any:
    """What another package gives for an operation that has no row here; None where none does.

    Raises SpecError for a package that cannot be imported.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        try:
            return point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.module
            raise SpecError(
                f"op {name!r} is of the package {package}, which cannot be imported: {type(error).__name__}: {error}; "
                "install it again"
            ) from error
    return None
