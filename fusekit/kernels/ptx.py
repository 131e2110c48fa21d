"""Instructions of sm_90 that the kernels address directly, one thin function each.

The kernels name tensor-map coordinates themselves instead of partitioning TMA tensors, so that the only thing a tensor
map adds to the kernel's parameters is its 128 descriptor bytes. Sources: PTX ISA, sections "cp.async.bulk.tensor",
"stmatrix", "shfl.sync", "ex2" and "cvt".
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32

from fusekit.kernels.inline import inline


def divide(a: Int32, b) -> Int32:
    """a // b of numbers that are never negative; the signed division rounds towards minus infinity, at a price."""
    return Int32(Uint32(a) // Uint32(b))


def modulo(a: Int32, b) -> Int32:
    """a % b of numbers that are never negative."""
    return Int32(Uint32(a) % Uint32(b))


def minimum_of(a: Int32, b) -> Int32:
    """The smaller of two integers."""
    return cutlass.min(a, b)


def maximum_of(a: Int32, b) -> Int32:
    """The larger of two integers."""
    return cutlass.max(a, b)


def flag(condition) -> Int32:
    """1 where the condition holds, else 0."""
    return Int32(condition)


def fresh(value: Int32) -> Int32:
    """The same number, but what follows from it is worked out here and not ahead of a loop, where it would have to be
    kept in a register until it is used.
    """
    return inline(Int32, "mov.b32 {$w0}, {$r0};", value)


def fresh_float(value: Float32) -> Float32:
    """The same number in a register of its own."""
    return inline(Float32, "mov.b32 {$w0}, {$r0};", value)


def worked_out(first: Float32, second: Float32, rows: Int32) -> None:
    """Both numbers are worked out before this point: ptxas would put it off over barriers, and meanwhile hold all that
    they are made of. It is an operand of a store that never happens.

    rows: a number that is not negative, which ptxas cannot know.
    """
    text = (
        "{ .reg .pred p; .reg .b32 a; setp.lt.s32 p, {$r2}, 0; mov.b32 a, 0; @p st.shared.v2.f32 [a], {{$r0}, {$r1}}; }"
    )
    inline(None, text, first, second, rows)


def tma_load(descriptor, destination, barrier, coordinates, multicast_mask=None) -> None:
    """Start one box from global to shared memory; `barrier` receives its bytes. One thread calls it.

    `coordinates` are innermost first. With `multicast_mask` the box lands at the same offset in every CTA of the mask,
    and each of them has the barrier at that offset credited.
    """
    rank = len(coordinates)
    arguments = [destination.toint(), descriptor.toint(), barrier.toint(), *[Int32(c) for c in coordinates]]
    holes = ", ".join(f"{{$r{3 + i}}}" for i in range(rank))
    kind, tail = "", f" [{{$r0}}], [{{$r1}}, {{{holes}}}], [{{$r2}}]"
    if multicast_mask is not None:
        kind, tail = ".multicast::cluster", f"{tail}, {{$r{len(arguments)}}}"
        arguments.append(cutlass.Int16(multicast_mask))
    text = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{kind}{tail};"
    inline(None, text, *arguments)


def tma_store(descriptor, source, coordinates, add: bool = False) -> None:
    """Start one box from shared to global memory, in the calling thread's current bulk group; `add` adds it there."""
    rank = len(coordinates)
    arguments = [source.toint(), descriptor.toint(), *[Int32(c) for c in coordinates]]
    holes = ", ".join(f"{{$r{2 + i}}}" for i in range(rank))
    name, reduction = ("cp.reduce.async", ".add") if add else ("cp.async", "")
    text = (
        f"{name}.bulk.tensor.{rank}d.global.shared::cta{reduction}.tile.bulk_group [{{$r1}}, {{{holes}}}], [{{$r0}}];"
    )
    inline(None, text, *arguments)


def store_matrix_x4(address: Int32, registers, turned: bool = False) -> None:
    """stmatrix of four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, or of
    column l % 8 where they are stored `turned`.
    """
    turn = ".trans" if turned else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};"
    inline(None, text, address, *registers)


def load_matrix_x4(address: Int32):
    """ldmatrix of four 8x8 matrices of 16-bit elements; addresses as for `store_matrix_x4`."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return inline([Uint32] * 4, text, address)


def unpack_pair(packed: Uint32, dtype):
    """The two halves of a register of bf16x2 or fp16x2 as float32, the low one first."""
    if dtype is cutlass.BFloat16:  # the upper half of a float32
        text = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        text = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
    return inline([Float32] * 2, text, packed)


def load_shared_b32x2(address: Int32):
    """Two registers from shared memory, 8-byte aligned."""
    return inline([Uint32] * 2, "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", address)


def store_shared_b32x2(address: Int32, first: Uint32, second: Uint32) -> None:
    """Two registers to shared memory, 8-byte aligned."""
    inline(None, "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", address, first, second)


def maximum_in_memory(address: Int64, bits: Uint32, valid) -> None:
    """The larger of a word of global memory and `bits`, unsigned, where `valid`; atomic."""
    text = "{ .reg .pred ok_; setp.ne.b32 ok_, {$r2}, 0; @ok_ red.relaxed.gpu.global.max.u32 [{$r0}], {$r1}; }"
    inline(None, text, address, bits, Int32(valid))


def where_at_most(a: Float32, b: Float32, value: Float32) -> Float32:
    """`value` where a <= b or a is NaN, else zero, whatever `value` is."""
    text = "{ .reg .pred p; setp.leu.f32 p, {$r0}, {$r1}; selp.f32 {$w0}, {$r2}, 0f00000000, p; }"
    return inline(Float32, text, a, b, value)


def where_within(a: Float32, b: Float32, value: Float32) -> Float32:
    """`value` where |a| <= b or a is NaN, else zero, whatever `value` is."""
    text = (
        "{ .reg .pred p; .reg .f32 t; abs.f32 t, {$r0};"
        " setp.leu.f32 p, t, {$r1}; selp.f32 {$w0}, {$r2}, 0f00000000, p; }"
    )
    return inline(Float32, text, a, b, value)


def load_parts_x4(address: cutlass.Int64, there: Int32):
    """Four neighbours, 16-byte aligned, that another SM may have written, or zeros where `there` is 0."""
    text = (
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000;"
        " mov.f32 {$w2}, 0f00000000; mov.f32 {$w3}, 0f00000000;"
        " @p ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }"
    )
    return inline([Float32] * 4, text, address, there)


def store_parts_x4(address: cutlass.Int64, values) -> None:
    """Four float32 to global memory, 16-byte aligned."""
    inline(None, "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *values)


def choose(flag: Int32, a: Float32, b: Float32) -> Float32:
    """`a` where `flag` is not zero, else `b`."""
    return inline(Float32, "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }", flag, a, b)


def where_above(a: Int32, bound: int, value: Float32) -> Float32:
    """`value` where a > bound, else zero, whatever `value` is."""
    text = f"{{ .reg .pred p; setp.gt.s32 p, {{$r0}}, {bound}; selp.f32 {{$w0}}, {{$r1}}, 0f00000000, p; }}"
    return inline(Float32, text, a, value)


def pack_pair(low: Float32, high: Float32, dtype) -> Uint32:
    """Two float32 rounded to nearest even into one register of bf16x2 or fp16x2, `low` in the low half."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return inline(Uint32, f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", high, low)


def exp2_approx(x: Float32) -> Float32:
    """2^x, relative error about 2^-22, subnormal results flushed."""
    return inline(Float32, "ex2.approx.ftz.f32 {$w0}, {$r0};", x)


def reciprocal_approx(x: Float32) -> Float32:
    """1/x within one unit in the last place."""
    return inline(Float32, "rcp.approx.ftz.f32 {$w0}, {$r0};", x)


def minimum(a: Float32, b: Float32) -> Float32:
    """min that passes a NaN on, as NumPy's and torch's do."""
    return inline(Float32, "min.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def maximum(a: Float32, b: Float32) -> Float32:
    """max that passes a NaN on, as NumPy's and torch's do."""
    return inline(Float32, "max.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def permute_bytes(a: Uint32, b: Uint32, selector: Uint32) -> Uint32:
    """prmt: picks four of the eight bytes of (b, a)."""
    return inline(Uint32, "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, selector)


def load_shared_v4(address: Int32):
    """Four int32 from shared memory, 16-byte aligned."""
    return inline([Int32] * 4, "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", address)


def store_shared_v4(address: Int32, values) -> None:
    """Four int32 to shared memory, 16-byte aligned."""
    inline(None, "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *[Int32(v) for v in values])


def store_shared_u16(address: Int32, value: Uint32, offset: int = 0) -> None:
    """The lower half of a register to shared memory, at address + offset."""
    inline(None, f"st.shared.u16 [{{$r0}}+{offset}], {{$r1}};", address, value)


def store_shared_u8(address: Int32, value: Uint32, offset: int = 0) -> None:
    """The lowest byte of a register to shared memory, at address + offset."""
    inline(None, f"st.shared.u8 [{{$r0}}+{offset}], {{$r1}};", address, value)


def word_where(flag: Int32, word: Uint32) -> Uint32:
    """`word` where `flag` is not zero, else zero."""
    text = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, 0, p; }"
    return inline(Uint32, text, flag, word)


def store_shared_f32x2(address: Int32, low: Float32, high: Float32) -> None:
    """Two float32 to shared memory, 8-byte aligned."""
    inline(None, "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", address, low, high)


def store_shared_f32(address: Int32, value: Float32) -> None:
    """One float32 to shared memory."""
    inline(None, "st.shared.f32 [{$r0}], {$r1};", address, value)


def load_shared_f32(address: Int32) -> Float32:
    """One float32 from shared memory."""
    return inline(Float32, "ld.volatile.shared.f32 {$w0}, [{$r0}];", address)


def load_shared_f32x4(address: Int32):
    """Four float32 from shared memory, 16-byte aligned."""
    return inline([Float32] * 4, "ld.volatile.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", address)


def load_shared_f32x2(address: Int32):
    """Two float32 from shared memory, 8-byte aligned; volatile, or the compiler keeps the values for the next block."""
    return inline([Float32] * 2, "ld.volatile.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", address)


def mapped_address(address: Int32, rank: Int32) -> Int32:
    """Cluster address of what lies at `address` in the shared memory of CTA `rank`."""
    return inline(Int32, "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", address, rank)


def arrive_at(barrier: Int32, rank: int) -> None:
    """Arrive at CTA `rank`'s barrier of this local address; its own address is not kept in a register."""
    text = (
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, {{$r0}}, {rank}; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
    )
    inline(None, text, barrier)


def arrive_expecting(barrier: Int32, size: int) -> None:
    """Arrive on a barrier anywhere in the cluster, of which `size` bytes are then awaited."""
    text = "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [{$r0}], {$r1};"
    inline(None, text, barrier, Int32(size))


def store_async_v4(address: Int32, barrier: Int32, values) -> None:
    """Four int32 into the shared memory of a CTA of the cluster, credited to a barrier there."""
    text = (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, [{$r1}];"
    )
    inline(None, text, address, barrier, *[Int32(v) for v in values])


def load_below(pointer, index: Int32, end: Int32) -> Int32:
    """An int32 of read-only global memory, or -1 where index >= end."""
    text = (
        "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, {$r1}, {$r2}; mad.wide.s32 a, {$r1}, 4, {$r0};"
        " mov.b32 {$w0}, -1; @p ld.global.nc.b32 {$w0}, [a]; }"
    )
    return inline(Int32, text, pointer.toint(), index, end)


def load_written_below(pointer, index: Int32, end: Int32) -> Int32:
    """`load_below` of memory that this launch has written."""
    text = (
        "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, {$r1}, {$r2}; mad.wide.s32 a, {$r1}, 4, {$r0};"
        " mov.b32 {$w0}, -1; @p ld.global.b32 {$w0}, [a]; }"
    )
    return inline(Int32, text, pointer.toint(), index, end)


def units_where_below(number: Int32, end: Int32, units: Int32) -> Int32:
    """number * units where 0 <= number < end, else -1; the product is one of unsigned numbers."""
    text = (
        "{ .reg .pred p; .reg .b32 a; setp.lt.u32 p, {$r0}, {$r1}; mul.lo.u32 a, {$r0}, {$r2};"
        " selp.b32 {$w0}, a, -1, p; }"
    )
    return inline(Int32, text, number, end, units)


def unit_address(base: cutlass.Int64, units: Int32) -> cutlass.Int64:
    """`units` times 16 bytes after `base`; units is unsigned."""
    return inline(cutlass.Int64, "mad.wide.u32 {$w0}, {$r1}, 16, {$r0};", base, units)


def advance(address: cutlass.Int64, size: int) -> cutlass.Int64:
    """`size` bytes on, in the register that it has: the compiler would rather add to one address that all begin at."""
    return inline(cutlass.Int64, f"add.s64 {{$w0}}, {{$r0}}, {size};", address)


def flag_none(flags: Int32, number: int, units: Int32) -> Int32:
    """`flags` with bit `number` set where units is -1."""
    text = (
        f"{{ .reg .pred p; setp.eq.s32 p, {{$r1}}, -1; mov.b32 {{$w0}}, {{$r0}};"
        f" @p or.b32 {{$w0}}, {{$r0}}, {1 << number}; }}"
    )
    return inline(Int32, text, flags, units)


def all_unless_above(flags: Int32, a: Int32, bound: int) -> Int32:
    """`flags` where a > bound, else all of them."""
    text = f"{{ .reg .pred p; setp.gt.s32 p, {{$r1}}, {bound}; selp.b32 {{$w0}}, {{$r0}}, -1, p; }}"
    return inline(Int32, text, flags, a)


def copy_async(destination: Int32, place: int, source: cutlass.Int64, offset: int, flags: Int32, number: int) -> None:
    """Start a copy of 16 bytes from global to shared memory, past L1; of zeros, nothing read, where bit `number` of
    `flags` is set.

    destination + place, source + offset: the addresses.
    """
    text = (
        f"{{ .reg .pred p; .reg .b32 bit; and.b32 bit, {{$r2}}, {1 << number}; setp.ne.s32 p, bit, 0;"
        f" cp.async.cg.shared.global.L2::256B [{{$r0}}+{place}], [{{$r1}}+{offset}], 16, p; }}"
    )
    inline(None, text, destination, source, flags)
