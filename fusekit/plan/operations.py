"""The operations as rows of facts: what is known of one by its name is a field here."""

from __future__ import annotations

from dataclasses import dataclass

GEMM, ROUTER, PERMUTATION, CHECK, EXTERN = "gemm", "router", "permutation", "check", "extern"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Of a GEMM: tiles: the dims along which a tile's M and N lie; reduction: the dim that is summed over; ragged: the dim
    of which each of E groups has a part, "" where there are none.

    Of one that works token by token: wide: rows have H elements; long_row: experts from which on 4 warps a block are
    better than 8, 0 for never.
    """

    name: str
    family: str
    tiles: tuple[str, str] | None = None
    reduction: str = ""
    ragged: str = ""
    wide: bool = False
    long_row: int = 0

    @property
    def token_wise(self) -> bool:
        """Whether the rows of its problem are tokens, T."""
        return self.family in (ROUTER, PERMUTATION, CHECK)

    @property
    def reduces_groups(self) -> bool:
        """Whether the sum is over a group's rows, as in a weight gradient."""
        return bool(self.ragged) and self.ragged == self.reduction


OPERATIONS = {
    row.name: row
    for row in (
        Operation("dense-gemm", GEMM, ("M", "N"), "K"),
        Operation("grouped-gemm", GEMM, ("M", "N"), "K", "M"),
        Operation("grouped-wgrad", GEMM, ("N", "K"), "M", "M"),
        Operation("router-topk", ROUTER, long_row=1024),
        Operation("router-topk-bwd", ROUTER, long_row=1024),
        Operation("router-aux-score", ROUTER, long_row=1024),
        Operation("router-aux-score-bwd", ROUTER, long_row=1024),
        Operation("moe-aux-loss", ROUTER),
        Operation("moe-aux-loss-bwd", ROUTER),
        Operation("moe-index", PERMUTATION),
        Operation("moe-permute", PERMUTATION, wide=True),
        Operation("moe-permute-bwd", PERMUTATION, wide=True),
        Operation("moe-unpermute", PERMUTATION, wide=True),
        Operation("moe-unpermute-bwd", PERMUTATION, wide=True),
        Operation("moe-check", CHECK),
        Operation("extern", EXTERN),
    )
}
