"""What a warp does with memory and its lanes: vector loads and stores of a row, reductions, lists in shared memory.

Addresses are plain integers: Int64 for global, Int32 for shared memory. Loads of tensors go past L1, since every byte
is read once. Sources: PTX ISA, "ld.global.nc", "redux.sync", "shfl.sync".
"""

from cutlass import Float32, Float64, Int32, Int64, Uint32, Uint64, cute

from fusekit.kernels.inline import inline

WARP = 32

_SUFFIX = {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}
_STREAM = "ld.global.nc.L1::no_allocate"


def load(address: Int64, nbytes: int, valid=None, fill: int = 0, offset: int = 0) -> list:
    """1 to 16 bytes of a read-only tensor, at address + offset, as 32-bit words; words of `fill` unless `valid`."""
    count = max(1, nbytes // 4)
    names = [f"{{$w{index}}}" for index in range(count)]
    target = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    text = f"{_STREAM}.{_SUFFIX[nbytes]} {target}, [{{$r0}} + {offset}];"
    arguments = [address]
    if valid is not None:
        moves = " ".join(f"mov.b32 {name}, {fill};" for name in names)
        text = "{ .reg .pred ok_; setp.ne.b32 ok_, {$r1}, 0; " + moves + f" @ok_ {text} }}"
        arguments.append(Int32(valid))
    words = inline([Uint32] * count, text, *arguments)
    return [words] if count == 1 else list(words)


def store(address: Int64, words: list, nbytes: int, valid=None, offset: int = 0) -> None:
    """1 to 16 bytes to global memory, at address + offset, from 32-bit words."""
    names = [f"{{$r{1 + index}}}" for index in range(len(words))]
    value = names[0] if len(words) == 1 else "{" + ", ".join(names) + "}"
    text = f"st.global.{_SUFFIX[nbytes]} [{{$r0}} + {offset}], {value};"
    arguments = [address, *words]
    if valid is not None:
        text = f"{{ .reg .pred ok_; setp.ne.b32 ok_, {{$r{len(arguments)}}}, 0; @ok_ {text} }}"
        arguments.append(Int32(valid))
    inline(None, text, *arguments)


def prefetch(address: Int64, nbytes: Int32, valid) -> None:
    """Bytes, a multiple of 16, of global memory to L2 where `valid`."""
    text = "{ .reg .pred ok_; setp.ne.b32 ok_, {$r2}, 0; @ok_ cp.async.bulk.prefetch.L2.global [{$r0}], {$r1}; }"
    inline(None, text, address, nbytes, Int32(valid))


def bits_of(x: Float32) -> Uint32:
    """The float's bits."""
    return inline(Uint32, "mov.b32 {$w0}, {$r0};", x)


def float_of(bits: Uint32) -> Float32:
    """The float with these bits."""
    return inline(Float32, "mov.b32 {$w0}, {$r0};", bits)


def unpack(words: list, count: int, dtype: str) -> list:
    """`count` elements of float32 or bf16 in 32-bit words, as float32."""
    if dtype == "f32":
        return [float_of(word) for word in words]
    halves = []
    for word in words:
        halves += [float_of(word << 16), float_of(word & Uint32(0xFFFF0000))]
    return halves[:count]


def pack(values: list, dtype: str) -> list:
    """float32 values rounded to nearest even to `dtype`, in 32-bit words; the inverse of `unpack`."""
    if dtype == "f32":
        return [bits_of(value) for value in values]
    pairs = list(zip(values[::2], [*values[1::2], Float32(0.0)], strict=False))
    pair = "bf16x2" if dtype == "bf16" else "f16x2"
    return [inline(Uint32, f"cvt.rn.{pair}.f32 {{$w0}}, {{$r0}}, {{$r1}};", high, low) for low, high in pairs]


def load_row(address: Int64, row, lane: Int32, dtype: str, fill: int = 0) -> list:
    """A lane's share of a row, as float32: all loads are issued before the first use. `fill`: a word past the end."""
    size = 4 if dtype == "f32" else 2
    start = address + Int64(lane * (row.vector * size))
    loaded = []
    for chunk in range(row.chunks):
        valid, words = row.valid(chunk, lane), []
        for part in range(0, row.vector * size, 16):
            width = min(16, row.vector * size - part)
            words += load(start, width, valid, fill, chunk * row.lanes * row.vector * size + part)
        loaded.append(words)
    return [value for words in loaded for value in unpack(words, row.vector, dtype)]


def store_row(address: Int64, row, lane: Int32, values: list, dtype: str) -> None:
    """A lane's share of a row to global memory."""
    size = 4 if dtype == "f32" else 2
    start = address + Int64(lane * (row.vector * size))
    for chunk in range(row.chunks):
        words = pack(values[chunk * row.vector : (chunk + 1) * row.vector], dtype)
        offset = chunk * row.lanes * row.vector * size
        store(start, words, row.vector * size, row.valid(chunk, lane), offset)


def clear(address: Int64, nbytes: int, lane: Int32) -> None:
    """Zeros to a row of `nbytes`, in the widest stores that keep rows aligned."""
    width = next(width for width in (16, 8, 4, 2, 1) if nbytes % width == 0)
    zeros = [Uint32(0)] * max(1, width // 4)
    count = nbytes // width
    start = address + Int64(lane * width)
    for first in range(0, count, 32):
        store(start, zeros, width, lane + first < count if first + 32 > count else None, first * width)


def extreme(operation: str, a: Uint32, b: Uint32) -> Uint32:
    """min or max of unsigned values; the DSL's own compares with a constant as signed."""
    return inline(Uint32, f"{operation}.u32 {{$w0}}, {{$r0}}, {{$r1}};", a, b)


def redux(value: Uint32, operation: str) -> Uint32:
    """add, min or max of an unsigned value over the warp, in every lane."""
    return inline(Uint32, f"redux.sync.{operation}.u32 {{$w0}}, {{$r0}}, 0xffffffff;", value)


def warp_sum(value: Float32, width: int = 32) -> Float32:
    """The sum over `width` neighbouring lanes, in every lane, added in the same order each time."""
    step = width // 2
    while step:
        value = value + cute.arch.shuffle_sync_bfly(value, step)
        step //= 2
    return value


def before(count: Int32, lane: Int32) -> Int32:
    """The sum of `count` over the lanes below this one."""
    total = count
    for step in (1, 2, 4, 8, 16):
        text = (
            f"{{ .reg .pred in_; .reg .b32 below_; shfl.sync.up.b32 below_|in_, {{$r0}}, {step}, 0, 0xffffffff;"
            " add.s32 {$w0}, {$r0}, 0; @in_ add.s32 {$w0}, {$w0}, below_; }"
        )
        total = inline(Int32, text, total)
    return total - count


def shared_load_u32(address: Int32) -> Uint32:
    """Four bytes of shared memory."""
    return inline(Uint32, "ld.volatile.shared.b32 {$w0}, [{$r0}];", address)


def shared_load_u64(address: Int32) -> Uint64:
    """Eight bytes of shared memory, aligned."""
    return inline(Uint64, "ld.volatile.shared.b64 {$w0}, [{$r0}];", address)


def shared_store_u32(address: Int32, value: Uint32) -> None:
    """Four bytes to shared memory."""
    inline(None, "st.volatile.shared.b32 [{$r0}], {$r1};", address, value)


def shared_store_u32_if(address: Int32, value: Uint32, valid) -> None:
    """Four bytes to shared memory where `valid`."""
    text = "{ .reg .pred ok_; setp.ne.b32 ok_, {$r2}, 0; @ok_ st.volatile.shared.b32 [{$r0}], {$r1}; }"
    inline(None, text, address, value, Int32(valid))


def shared_store_u64(address: Int32, value: Uint64) -> None:
    """Eight bytes to shared memory, aligned."""
    inline(None, "st.volatile.shared.b64 [{$r0}], {$r1};", address, value)


def shared_or(address: Int32, value: Uint32) -> None:
    """Sets bits of a word in shared memory; the order of several lanes does not matter."""
    inline(None, "red.shared.or.b32 [{$r0}], {$r1};", address, value)


def shared_add_if(address: Int32, valid) -> None:
    """Adds 1 to a word in shared memory where `valid`; the order of several lanes does not matter."""
    text = "{ .reg .pred ok_; setp.ne.b32 ok_, {$r1}, 0; @ok_ red.shared.add.u32 [{$r0}], 1; }"
    inline(None, text, address, Int32(valid))


def cluster_store_u32(address: Int32, value: Uint32, block: Int32, valid) -> None:
    """Four bytes to this address in the shared memory of one of the cluster's blocks, where `valid`."""
    text = (
        "{ .reg .pred ok_; .reg .b32 there_; setp.ne.b32 ok_, {$r3}, 0;"
        " @ok_ mapa.shared::cluster.u32 there_, {$r0}, {$r2}; @ok_ st.shared::cluster.b32 [there_], {$r1}; }"
    )
    inline(None, text, address, value, block, Int32(valid))


def match_any(value: Uint32) -> Uint32:
    """The lanes of the warp that have this lane's value, as bits."""
    return inline(Uint32, "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;", value)


def exchange_f64(value: Float64, distance: int) -> Float64:
    """The value of the lane whose number differs in the bit `distance`."""
    text = (
        "{ .reg .b32 low_, high_; mov.b64 {low_, high_}, {$r0};"
        f" shfl.sync.bfly.b32 low_, low_, {distance}, 31, 0xffffffff;"
        f" shfl.sync.bfly.b32 high_, high_, {distance}, 31, 0xffffffff; mov.b64 {{$w0}}, {{low_, high_}}; }}"
    )
    return inline(Float64, text, value)


def shared_load_f64(address: Int32) -> Float64:
    """A float64 of shared memory."""
    return inline(Float64, "ld.volatile.shared.f64 {$w0}, [{$r0}];", address)


def shared_store_f64(address: Int32, value: Float64) -> None:
    """A float64 to shared memory."""
    inline(None, "st.volatile.shared.f64 [{$r0}], {$r1};", address, value)


def first_block_store_f64(address: Int32, value: Float64) -> None:
    """A float64 to this address in the shared memory of the cluster's first block."""
    text = "{ .reg .b32 there_; mapa.shared::cluster.u32 there_, {$r0}, 0; st.shared::cluster.f64 [there_], {$r1}; }"
    inline(None, text, address, value)
