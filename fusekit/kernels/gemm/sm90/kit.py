"""What Hopper has for the device halves of operands: tensor maps, boxes, and words of the tile ring."""

from fusekit.kernels.gemm.sm90.boxes import Boxes
from fusekit.kernels.gemm.sm90.main_loop import release
from fusekit.kernels.gemm.sm90.maps import (
    box_map,
    load_map,
    load_op,
    not_empty,
    ragged_map,
    ragged_place,
    store_op,
    swizzled,
    z_map,
    z_place,
)
from fusekit.kernels.gemm.sm90.scheduler import LocalRows, blocks_between, column_of
from fusekit.kernels.gemm.sm90.staging import StagingBoxes
from fusekit.plan.arch.sm_90a import WARP_ROWS

__all__ = [
    "WARP_ROWS",
    "Boxes", "LocalRows", "StagingBoxes", "blocks_between", "box_map", "column_of", "load_map", "load_op", "not_empty",
    "ragged_map", "ragged_place", "release", "store_op", "swizzled", "z_map", "z_place",
]  # fmt: skip
