"""Waiting for rows that other ranks send, flag by flag. How the ranks agree: fusekit/kernels/exchange/base.py.

A gathering warp knows the places of its rows of a tile. Before it copies the first, each lane waits for the flag of its
place's chunk. Once the launch that sends rows has seen all flags, it sets one word, and no flag is read again.

The scheduler begins with the tiles that have only rows of the rank's own tokens, in the first 32 groups: rows of a
group are in the order of places, so they lie together. Which tile is done when changes no bits.
"""

from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.dsl import dsl_user_op, inline_i32
from fusekit.kernels.exchange import signals
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.kernels.inline import inline
from fusekit.plan.exchange import CAME, CHUNK, EPOCH, HEADER, LOCAL_TOKENS, SENDING, STATUS, WAIT

# $0: 1 once the word at $1 is $2 or later, 0 if it is neither in $4 milliseconds, or the word at $3 says that a wait
# failed. Few are late, so only they read the clock.
ARRIVED = """{
    .reg .pred there_, left_; .reg .b32 seen_, bad_; .reg .b64 now_, end_;
    ld.acquire.sys.global.b32 seen_, [$1];
    sub.s32 seen_, seen_, $2;
    setp.ge.s32 there_, seen_, 0;
    @there_ bra out_;
    mov.u64 end_, %globaltimer;
    mul.wide.s32 now_, $4, 1000000;
    add.u64 end_, end_, now_;
again_:
    nanosleep.u32 100;
    ld.acquire.sys.global.b32 seen_, [$1];
    sub.s32 seen_, seen_, $2;
    setp.ge.s32 there_, seen_, 0;
    @there_ bra out_;
    ld.relaxed.sys.global.b32 bad_, [$3];
    setp.ne.b32 left_, bad_, 0;
    @left_ bra out_;
    mov.u64 now_, %globaltimer;
    setp.lt.u64 left_, now_, end_;
    @left_ bra again_;
out_:
    selp.b32 $0, 1, 0, there_;
}"""


@dsl_user_op
def arrived(flag: Int64, epoch: Int32, status: Int64, milliseconds: Int32, *, loc=None, ip=None) -> Int32:
    """1 once the flag is up, 0 if it is not in time; what was released is then seen."""
    operands = (Int64(flag), Int32(epoch), Int64(status), Int32(milliseconds))
    return Int32(inline_i32(ARRIVED, "=r,l,r,l,r,~{memory}", operands, loc, ip))


def acquire(address: Int64) -> Int32:
    """A word that another kernel of this GPU released."""
    return inline(Int32, "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", address)


class Arrivals(DeviceOperand):
    """What the gathering warps ask."""

    def parameter(self, given):
        return given.arrivals.iterator

    def source(self, source, operands):
        return self.kit.LocalRows(source, operands.gather.index, operands.arrivals)

    @cute.jit
    def wait(self, arrivals, places: tuple, count: Int32, here: Int32):
        """(the places, -1 for rows that did not come; whether all rows are here). All lanes of a warp.

        places: of rows of x; only those in [0, count) are. here: whether all rows were here before.
        """
        if here == 0:
            window = arrivals.toint()
            epoch = Int32(signals.load(window + EPOCH))
            here = Int32(cute.arch.vote_all_sync(acquire(window + CAME) == epoch))
            if here == 0:
                places = tuple(self.place(window, place, count, epoch) for place in places)
                cute.arch.sync_warp()
        return places, here

    @cute.jit
    def place(self, window: Int64, place: Int32, count: Int32, epoch: Int32):
        """The place once its row is here."""
        if (place >= 0) & (place < count):
            flag = window + HEADER + Int64(ptx.divide(place, CHUNK)) * 4
            if arrived(flag, epoch, window + STATUS, Int32(signals.load(window + WAIT))) == 0:
                room = Int32(signals.load(window + (LOCAL_TOKENS + 4))) - Int32(signals.load(window + LOCAL_TOKENS))
                signals.fail(window + STATUS, ptx.divide(place, room), SENDING, epoch, 1)
                place = Int32(-1)
        return place
