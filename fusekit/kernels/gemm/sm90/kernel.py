"""The Hopper kernel: dense and grouped GEMM with composed operands, persistent and warp-specialised.

    y[rows of e] = epilogue(x[rows of e] . w[e]),   16-bit or FP8 operands, float32 accumulation (wgmma m64nNk16, or
    k32)

Warps of a CTA (384 threads, 512 with a gathered factor; one CTA an SM):

    warp 0       load       one thread: TMA boxes of x and w into the operand pipeline, multicast over the cluster
    warp 1       schedule   turns tile numbers into (group, m, n), fills the tile ring (scheduler.py)
    warps 2-3    idle, or at work for an operand (its `assist`)
    warps 4-7    consumer warpgroup 0: wgmma, then the epilogue (epilogue.py, backward.py)
    warps 8-11   consumer warpgroup 1
    warps 12-15  gather     rows that an index chooses, where a factor has them (operands/gather.py)
                 turn       FP8 values of the transpose of dz, where it is asked for (operands/turned.py)

Ping-pong: a warpgroup owns whole tiles, 0 the even and 1 the odd ones of the CTA; while one runs its epilogue, the
other holds the tensor cores, and named barriers hand them over. Cooperative: both share a tile, each half of its rows.

DeviceOperand pipeline, `stages` deep; a stage is x [tile_m, tile_k] and w [tile_n, tile_k], 128-byte swizzled:

    full[s]    1 arrival (the load thread, which announces the stage's bytes) + those bytes; and where a factor is
               gathered, 1 of the warp that hands it on
    empty[s]   4 arrivals (one a warp) of each warpgroup that reads the stage, from every CTA of the cluster; and one of
               each idle warp that reads it for an operand

    time ->      load   | k0 k1 k2 ...            | next tile's k0 k1 ...
    ping-pong    wg 0   |    mma(tile 0)          | epilogue(tile 0)     | mma(tile 2)
                 wg 1   |    (waits its turn)     | mma(tile 1)          | epilogue(tile 1)

The two CTAs of a cluster share w or x, depending on the tile (raster.py): each loads half of it and multicasts that.

What the kernel takes, where things lie in shared memory and how many arrive at each barrier is in the plan.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Extents, Idle, Tile, Work, dtype_of, struct
from fusekit.kernels.gemm.sm90.main_loop import MainLoop, Run, Stages
from fusekit.kernels.gemm.sm90.scheduler import Scheduler, TileRing, column_of
from fusekit.plan.gemm import GemmPlan


class Gemm:
    """One kernel; calling it (through cute.compile) traces host function and device code."""

    def __init__(self, plan: GemmPlan, halves, main_loop: MainLoop, epilogue, scheduler: Scheduler) -> None:
        self.plan, self.halves = plan, halves
        self.main_loop, self.epilogue, self.scheduler = main_loop, epilogue, scheduler
        self.factors = tuple(map(dtype_of, plan.factors))

    # -- host ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, given, sm_count: Int32, cluster_margin: Int32, stream: CUstream):
        """Make the tensor maps and the grid, launch. given: the launch's arguments, by name."""
        plan = self.plan
        groups = self.epilogue.operands.groups(given)
        rows, n, k = self.main_loop.extents(given)
        most_tiles = self.main_loop.most_tiles(Extents(groups, rows, n, None, k))
        # One cluster for each cluster tile there can be at most, or as many as fit on the SMs that are not reserved
        # (cluster_margin).
        resident = Int64(sm_count // plan.cluster_size - cluster_margin)
        clusters = Int32(cutlass.max(cutlass.min(resident, most_tiles), 1))
        for half in self.halves.values():
            half.precede(given, groups, stream)
        self.kernel(self.parameters(given), groups, rows, n, k).launch(
            grid=[clusters * plan.cluster_size, 1, 1],
            block=[plan.threads, 1, 1],
            cluster=[plan.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=plan.begins_early,
            stream=stream,
        )
        for half in self.halves.values():
            half.then(given, groups, stream)

    def parameters(self, given):
        """The kernel's parameters by operand, then the workspace if there is one."""
        operands = {name: half.operand for name, half in self.halves.items()}
        order = sorted(
            self.halves,
            key=lambda name: operands[name].order if operands[name].parameter is None else operands[name].parameter,
        )
        fields = [(name, self.halves[name].parameter(given)) for name in order]
        if hasattr(given, "workspace"):
            fields.append(("workspace", given.workspace.iterator))
        return struct("Parameters", [(name, value) for name, value in fields if value is not None])

    # -- device -------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, operands, groups, rows: Int32, n: Int32, k: Int32):
        """All roles; see the module's docstring."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        shared = self.allocate()
        stages = Stages(
            cute.recast_ptr(shared.x, dtype=self.factors[0]),
            cute.recast_ptr(shared.w, dtype=self.factors[1]),
            shared.stages_full,
            shared.stages_empty,
            getattr(shared, "scales", None),
            getattr(shared, "exchange", None),
        )
        ring = TileRing(plan, shared.tiles.toint(), shared.tiles_full, shared.tiles_empty)
        if warp == 0 and lane == 0:
            for name, index, arrivals in tuple(plan.shared.barriers):
                cute.arch.mbarrier_init(getattr(shared, name) + index, arrivals)
            cute.arch.mbarrier_init_fence()
            for copy in tensor_maps(operands):
                cpasync.prefetch_descriptor(copy)
        if cutlass.const_expr(plan.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        half_n = ptx.divide(n, 2)
        extents = Extents(groups if cutlass.const_expr(groups is not None) else Int32(1), rows, n, half_n, k)
        self.epilogue.operands.opening(operands, shared, extents)
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.registers[0])
            if warp == 0:
                with cute.arch.elect_one():  # what ptxas knows to be one thread; lane == 0 loops around every load
                    self.main_loop.load(operands, stages, ring, extents, rank)
            if warp == 1:
                workspace = getattr(operands, "workspace", None)
                self.scheduler.run(ring, self.epilogue.operands.source(operands), extents, workspace, rank)
            self.epilogue.operands.assist(Idle(operands, shared, extents, ring, warp))
        elif cutlass.const_expr(plan.fourth):
            if warp < 4 + plan.consumer_warps:
                cute.arch.setmaxregister_increase(plan.registers[1])
                self.consume(operands, shared, stages, ring, extents)
            else:
                cute.arch.setmaxregister_decrease(plan.fourth_registers)
                self.epilogue.operands.fourth(Idle(operands, shared, extents, ring, warp - (4 + plan.consumer_warps)))
        else:
            cute.arch.setmaxregister_increase(plan.registers[1])
            self.consume(operands, shared, stages, ring, extents)
        if cutlass.const_expr(plan.cluster_size > 1):  # no CTA leaves while a peer may still arrive on its barriers
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def allocate(self):
        """Pointers to the plan's regions of shared memory."""
        allocator = cutlass.memory.SmemAllocator()
        fields = []
        for region in self.plan.shared.regions:
            pointer = allocator.allocate(region.bytes, region.alignment)
            fields.append((region.name, cute.recast_ptr(pointer, dtype=Int64) if region.arrivals else pointer))
        return struct("Shared", fields)

    @cute.jit
    def consume(self, operands, shared, stages: Stages, ring: TileRing, extents: Extents):
        """A consumer warpgroup: its tiles' main loops and epilogues."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        consumer = cute.arch.make_warp_uniform(ptx.divide(thread, plan.arch.warpgroup)) - 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row_offset = 0 if cutlass.const_expr(plan.pingpong) else consumer * plan.warpgroup_rows
        x_offset = 0 if cutlass.const_expr(plan.exchanged) else row_offset  # else a warpgroup multiplies all rows
        k_tiles = ptx.divide(extents.k + (plan.tile_k - 1), plan.tile_k)
        most, fragments = self.main_loop.fragments(stages.x + x_offset * plan.tile_k, stages.w)
        acc = cute.make_tensor(most.iterator, cute.make_layout(cute.size(most)))
        warp_state = self.epilogue.operands.begin(shared, consumer)
        work = self.work(operands, shared, extents, consumer, warp, thread)

        count = Int32(0)
        step = 1
        seen = Int32(0)  # whatever the epilogue counts from tile to tile
        if cutlass.const_expr(plan.pingpong):
            step = 2
            count = consumer
            if consumer == 1:  # warpgroup 0 goes first
                self.main_loop.turns.pass_on(1)
        row, end, n_tile, group = ring.get(count)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            if cutlass.const_expr(plan.alternates):  # in turn, each all rows of a tile
                row_offset = ((consumer + count) & 1) * plan.warpgroup_rows
            if cutlass.const_expr(plan.swapped):
                end = cutlass.min(end, row + plan.tile[0])  # the epilogue's blocks are higher than the tile
            tile = Tile(row + row_offset, end, column_of(n_tile), group, count)
            self.epilogue.prepare(tile, work, warp_state, seen)
            self.main_loop.turns.take(consumer)
            run = Run(ptx.fresh(count) * k_tiles, k_tiles)  # one number less goes from tile to tile
            run = self.main_loop.of_tile(run, tile, work)
            self.main_loop.run_tile(most, fragments, stages, run, end - row - row_offset, consumer, lane)
            seen = self.epilogue.run(acc, tile, work, warp_state, seen)
            count += step
            count = ptx.fresh(count)  # else the slot's address, of two slots the same each time, is kept over a tile
            row, end, n_tile, group = ring.get(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)
        self.epilogue.finish(count, work)

    def work(self, operands, shared, extents: Extents, consumer: Int32, warp: Int32, thread: Int32) -> Work:
        """What one consumer warp works with."""
        views = struct(
            "Views",
            [
                (name, self.halves[name].view(value) if name in self.halves else value)
                for name, value in operands._asdict().items()
            ],
        )
        warp_of_cta = consumer * 4 + warp
        staging = shared.staging + warp_of_cta * self.plan.warp_bytes
        return Work(
            views, shared, extents, staging, warp_of_cta, consumer, ptx.modulo(thread, self.plan.arch.warpgroup)
        )


def tensor_maps(operands) -> list:
    """The tensor maps among the kernel's parameters."""
    maps = []
    for value in operands:
        if isinstance(value, cute.CopyAtom):
            maps.append(value)
        elif isinstance(value, tuple):
            maps += tensor_maps(value)
    return maps
