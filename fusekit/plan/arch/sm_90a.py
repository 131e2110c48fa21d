"""Hopper: H100, H200.

Sources: CUDA C++ Programming Guide, "Compute Capabilities" (227 KiB of shared memory a block, 65536 registers a
multiprocessor); PTX ISA, "wgmma" (64 rows, N up to 256), "setmaxnreg" (multiples of 8). 132 multiprocessors have those
with an SXM socket.
"""

from fusekit.plan.arch.base import Architecture

ROW = Architecture(
    name="sm_90a",
    kernels="sm90",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    accumulator_registers=192,
    splits=((24, 240), (40, 232)),
    crowd=160,
    consumer_warpgroups=2,
    mma_rows=64,
    tile_rows={"pingpong": (64, 128), "cooperative": (128, 256), "swap-ab": (16, 32)},
    max_tile_n=256,
    gather_tile_n=192,
    swizzle_bytes=128,
    fourth_registers={"few": 32, "usual": 40, "tall": 56},
    load_registers={"idle": 24, "few": 32, "usual": 40, "tall": 40},
    register_step=8,
    spare_registers=32,
    default=True,
)
WARP_ROWS = ROW.warp_rows
