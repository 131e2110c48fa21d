"""moe-check: whether the ends of the groups rise and lie within the rows, written to a report that the host may read.

    group e is wrong where offsets[e] < offsets[e - 1] (0 before the first) or offsets[e] > rows

One warp looks at all groups. Where one is wrong it writes the first of them to the report, which lies in host memory as
a rule: nothing is written otherwise. `started` and `finished` count the launches that found one; while they differ, the
words between them are being written. Launches that share a report must not overlap.

Words of the report: finished, group, where it begins, where it ends, rows, started; two are left alone.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.inline import inline
from fusekit.kernels.lanes import WARP

BATCH = 4  # groups that a lane has in flight
NONE = 0xFFFFFFFF
# Every word by a store of its own, in order, as seen from the host.
TELL = """{
    .reg .pred wrong_; .reg .u32 count_;
    setp.ne.b32 wrong_, {$r1}, 0;
    @wrong_ ld.volatile.global.u32 count_, [{$r0}];
    @wrong_ add.u32 count_, count_, 1;
    @wrong_ st.volatile.global.u32 [{$r0} + 20], count_;
    @wrong_ membar.sys;
    @wrong_ st.volatile.global.u32 [{$r0} + 4], {$r2};
    @wrong_ st.volatile.global.u32 [{$r0} + 8], {$r3};
    @wrong_ st.volatile.global.u32 [{$r0} + 12], {$r4};
    @wrong_ st.volatile.global.u32 [{$r0} + 16], {$r5};
    @wrong_ membar.sys;
    @wrong_ st.volatile.global.u32 [{$r0}], count_;
}"""


class MoeCheck:
    """The kernel; calling it traces host function and kernel."""

    threads = WARP

    @classmethod
    def of(cls, spec) -> "MoeCheck":
        """The kernel of a spec."""
        return cls()

    @cute.jit
    def __call__(self, offsets: cute.Tensor, report: cute.Tensor, rows: Int32, stream: CUstream):
        """Launch."""
        self.kernel(offsets.iterator, report.iterator, offsets.shape[0], rows).launch(
            grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, offsets: cute.Pointer, report: cute.Pointer, groups: Int32, rows: Int32):
        """See the module's docstring."""
        lane, _, _ = cute.arch.thread_idx()
        first = Uint32(NONE)
        for base in cutlass.range(0, groups, WARP * BATCH):
            for place in cutlass.range_constexpr(BATCH):
                group = base + lane + WARP * place
                begin, end = self.extent(offsets.toint(), group, groups)
                wrong = (group < groups) & ((end < begin) | (end > rows))
                first = lanes.extreme("min", first, cutlass.select_(wrong, Uint32(group), Uint32(NONE)))
        first = lanes.redux(first, "min")
        wrong = (first != Uint32(NONE)) & (lane == 0)
        group = Int32(cutlass.select_(wrong, first, Uint32(0)))
        begin, end = self.extent(offsets.toint(), group, groups)
        inline(None, TELL, report.toint(), Int32(wrong), group, begin, end, rows)

    def extent(self, offsets: Int64, group: Int32, groups: Int32):
        """Where a group begins and ends; 0 for what is none."""
        there = group < groups
        address = offsets + Int64(group) * 4
        begin = lanes.load(address - Int64(4), 4, there & (group > 0))[0]
        return Int32(begin), Int32(lanes.load(address, 4, there)[0])
