"""The boxes of a stage, as a CTA or both of its cluster load them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.sm90.raster import ALONG_M

BOTH = 3  # multicast mask of a cluster of two


class Boxes(NamedTuple):
    """An operand's boxes of one stage: consecutive in shared memory, each with a start of its own in the tensor.

    descriptor: its tensor map. starts: rows or columns at which the boxes begin; elements: how many each has; place:
    gives a box's coordinates from its start.
    """

    descriptor: Any
    destination: Any
    barrier: Any
    starts: list
    elements: int
    place: Callable


@cute.jit
def load_share(x, w, n_tile: Int32, rank: Int32, stage: Int32, pair: cutlass.Constexpr):
    """This CTA's share of both operands: both whole, or one whole and half of the one that the cluster shares."""
    if cutlass.const_expr(not pair):
        load_all(x)
        load_all(w)
    elif n_tile >= ALONG_M:
        load_all(x)
        load_shared(w, rank, stage)
    else:
        load_shared(x, rank, stage)
        load_all(w)


@cute.jit
def load_alone(boxes, along: cutlass.Constexpr, n_tile: Int32, rank: Int32, stage: Int32, pair: cutlass.Constexpr):
    """This CTA's share of the one operand that is not gathered; along: a cluster shares it where it pairs ALONG_M."""
    if cutlass.const_expr(not pair):
        load_all(boxes)
    elif n_tile >= ALONG_M:
        load_shared(boxes, rank, stage) if along else load_all(boxes)
    else:
        load_all(boxes) if along else load_shared(boxes, rank, stage)


def load_all(boxes) -> None:
    """All boxes, for this CTA alone."""
    for number in range(len(boxes.starts)):
        load_box(boxes, number)


def load_box(boxes, number: int, mask: int | None = None) -> None:
    """One box."""
    destination = boxes.destination + number * boxes.elements
    ptx.tma_load(boxes.descriptor, destination, boxes.barrier, boxes.place(boxes.starts[number]), mask)


@cute.jit
def load_shared(boxes, rank: Int32, stage: Int32):
    """Half of the boxes, for both CTAs; of an odd number, who loads more alternates."""
    half = len(boxes.starts) // 2
    if cutlass.const_expr(len(boxes.starts) % 2 == 0):
        for number in cutlass.range_constexpr(half):
            first, second = boxes.starts[number], boxes.starts[number + half]
            destination = boxes.destination + (rank * half + number) * boxes.elements
            where = boxes.place(first + rank * (second - first))
            ptx.tma_load(boxes.descriptor, destination, boxes.barrier, where, BOTH)
    else:
        for number in cutlass.range_constexpr(len(boxes.starts)):
            if (stage + number) & 1 == rank:
                load_box(boxes, number, BOTH)
