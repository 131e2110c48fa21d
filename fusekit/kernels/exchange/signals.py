"""Words that several GPUs read and write, and what a block agrees on. Source: PTX ISA, "Memory Consistency Model".

A release at system scope is cumulative: what the block's other threads stored before the barrier that this thread has
passed is seen by whoever acquires the word.
"""

from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels.dsl import dsl_user_op, inline_i32
from fusekit.plan.exchange import NEXT, STATUS

WAIT = """{
    .reg .pred there_, left_; .reg .b32 seen_; .reg .b64 now_;
again_:
    ld.acquire.sys.global.b32 seen_, [$1];
    sub.s32 seen_, seen_, $2;
    setp.ge.s32 there_, seen_, 0;
    @there_ bra end_;
    nanosleep.u32 20;
    mov.u64 now_, %globaltimer;
    setp.lt.u64 left_, now_, $3;
    @left_ bra again_;
end_:
    selp.b32 $0, 1, 0, there_;
}"""
WAIT_SHARED = """{
    .reg .pred there_; .reg .b32 seen_;
again_:
    ld.acquire.cta.shared.b32 seen_, [{$r0}];
    setp.ge.s32 there_, seen_, {$r1};
    @!there_ bra again_;
}"""
FAIL = f"""{{
    .reg .pred mine_, last_; .reg .b32 old_, one_; .reg .b64 at_;
    setp.eq.b32 last_, {{$r4}}, 0;
    @last_ bra end_;
    add.s32 one_, {{$r1}}, 1;
    atom.global.cas.b32 old_, [{{$r0}}], 0, one_;
    setp.ne.b32 last_, old_, 0;
    @last_ bra end_;
    mov.b64 at_, {{$r0}};
    setp.eq.b32 mine_, old_, 0;
each_:
    @mine_ st.global.b32 [at_ + 4], {{$r2}};
    @mine_ st.global.b32 [at_ + 8], {{$r3}};
    ld.relaxed.sys.global.b64 at_, [at_ + {NEXT - STATUS}];
    setp.eq.b64 last_, at_, 0;
    @last_ bra end_;
    setp.eq.b64 last_, at_, {{$r0}};
    @last_ bra end_;
    atom.global.cas.b32 old_, [at_], 0, one_;
    setp.eq.b32 mine_, old_, 0;
    bra each_;
end_:
}}"""


@dsl_user_op
def wait(address: Int64, epoch: Int32, deadline: Int64, *, loc=None, ip=None) -> Int32:
    """1 once the word is `epoch` or a later one, 0 if it is neither by the deadline; what was released is then seen."""
    return Int32(inline_i32(WAIT, "=r,l,r,l,~{memory}", (Int64(address), Int32(epoch), Int64(deadline)), loc, ip))


def release(address: Int64, value: Int32) -> None:
    """A word for other GPUs, after everything that was stored before."""
    cute.arch.inline_ptx("st.release.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def load(address: Int64) -> Uint32:
    """A word that an earlier launch wrote."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def store(address: Int64, value) -> None:
    """A word for the next launch."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, Int32(value)])


def draw(address: Int64) -> Uint32:
    """The next number of a word of this GPU, from 0; it orders nothing."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Uint32], read_only_args=[address]
    )


def add(address: Int64, value: int) -> Uint32:
    """Adds to a word of this GPU, and gives what it was."""
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(value)],
    )


def add_shared(address: Int32) -> Uint32:
    """Adds 1 to a word of shared memory, and gives what it was; what was done before earlier additions is seen."""
    return cute.arch.inline_ptx(
        "atom.acq_rel.cta.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Uint32], read_only_args=[address]
    )


def release_shared(address: Int32, value: Int32) -> None:
    """A word for the block's other warps, after everything that this thread did before."""
    cute.arch.inline_ptx("st.release.cta.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def wait_shared(address: Int32, value: Int32) -> None:
    """Until a word of shared memory is `value` or more."""
    cute.arch.inline_ptx(WAIT_SHARED, read_only_args=[address, value])


def fail(address: Int64, rank: Int32, stage: int, epoch: Int32, condition) -> None:
    """Where `condition`: keeps who did not come, in all windows of this rank, unless something went wrong before."""
    cute.arch.inline_ptx(FAIL, read_only_args=[address, rank, Int32(stage), epoch, Int32(condition)])


def every(condition: Int32) -> Int32:
    """1 where no thread of the block has 0; a barrier."""
    return cute.arch.inline_ptx(
        "{ .reg .pred mine_, all_; setp.ne.b32 mine_, {$r0}, 0; barrier.red.and.pred all_, 0, mine_;"
        " selp.b32 {$w0}, 1, 0, all_; }",
        write_only_types=[Int32],
        read_only_args=[condition],
    )


def union(bits: Uint32) -> Uint32:
    """The bits that any lane of the warp has, in every lane."""
    return cute.arch.inline_ptx(
        "redux.sync.or.b32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[bits]
    )


def load_received(address: Int64, valid, offset: int) -> list:
    """16 bytes that a peer stored while this kernel ran, as words; zeros unless `valid`."""
    names = "{$w0}, {$w1}, {$w2}, {$w3}"
    moves = " ".join(f"mov.b32 {{$w{index}}}, 0;" for index in range(4))
    text = (
        "{ .reg .pred ok_; setp.ne.b32 ok_, {$r1}, 0; "
        + moves
        + f" @ok_ ld.relaxed.sys.global.v4.b32 {{{names}}}, [{{$r0}} + {offset}]; }}"
    )
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address, Int32(valid)]))


def load_word(address: Int64, valid) -> Uint32:
    """4 bytes that a peer stored while this kernel ran; 0 unless `valid`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred ok_; setp.ne.b32 ok_, {$r1}, 0; mov.b32 {$w0}, 0;"
        " @ok_ ld.relaxed.sys.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(valid)],
    )
