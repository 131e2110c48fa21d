"""Shared memory and register arithmetic: the one place that says which tiles fit an SM.

A CTA has three warpgroups: one fetches tiles with TMA, two run WGMMA and the epilogue. Its dynamic shared memory holds

    stages x (tile_m + tile_n) x 64 x 2 bytes, the A and B tiles in flight (tile K is 64, operands have 16 bits)
    32768 bytes      epilogue staging: 8 warps x 2 boxes x 16 rows x 64 columns x 2 bytes; half of it, in boxes of 32
                     columns, where that makes room for one more stage; float32 boxes have half as many columns.
                     With a backward activation: 8 warps x 3 boxes of z on their way, and 2 of y where it is recomputed
                     (or for sums of columns, where dbias is asked for)
    2304 bytes       two rows of bias (2 x 256 x 4 bytes), or less for sums of gradients; barriers and the scheduler's
                     ring (256 bytes)

Source of the limits: CUDA C++ Programming Guide, compute capability 9.0 (227 KiB of shared memory a block, 65536
registers a multiprocessor).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fusekit.errors import SpecError

MAINLOOPS = ("pingpong", "cooperative")
CLUSTERS = ((1, 1), (2, 1), (1, 2))
GLU_LAYOUTS = ("concat", "interleaved", "interleaved-32")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one architecture offers a CTA; bytes, or registers a thread."""

    shared_bytes: int = 232448
    reserved_bytes: int = 2304
    box_column_bytes: int = 256  # 8 warps x 16 rows x 2 bytes, for each column of an epilogue box
    tile_k: int = 64
    operand_bytes: int = 2
    min_stages: int = 3
    max_stages: int = 8
    threads: int = 384
    producer_registers: int = 24
    consumer_registers: int = 240
    accumulator_registers: int = 192  # of a consumer's 240; with more, the epilogue spills


SM90A = Limits()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a kernel of one tile uses. Bytes are dynamic shared memory a CTA; registers are a thread's.

    shared_bytes is an upper bound: a kernel without bias takes less, and its launch record says how much.
    """

    tile_k: int
    stages: int
    stage_bytes: int
    epilogue_box: int
    epilogue_bytes: int
    shared_bytes: int
    accumulator_registers: int
    consumer_registers: int
    producer_registers: int
    threads: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a combination cannot be built: the key to change, and the rule with its arithmetic."""

    key: str
    rule: str


# Rows of one CTA tile that each main loop can hold: a warpgroup's WGMMA has 64 rows, and may do one or two.
TILE_M = {"pingpong": (64, 128), "cooperative": (128, 256)}

# (b_major, glu_layout) -> what tile N is a multiple of, and why.
TILE_N = {
    ("k", "none"): (16, "WGMMA's N, and a 16-column epilogue step"),
    ("k", "concat"): (32, "the gate half and the up half are multiples of 16 each"),
    ("k", "interleaved"): (32, "gate and up columns are multiples of 16 each"),
    ("k", "interleaved-32"): (64, "a gate block and an up block have 32 columns each"),
    ("n", "none"): (64, "an n-major box is 64 columns wide"),
    ("n", "concat"): (128, "gate and up are n-major boxes, 64 columns wide each"),
    ("n", "interleaved"): (64, "an n-major box is 64 columns wide"),
    ("n", "interleaved-32"): (64, "an n-major box is 64 columns wide"),
}
MAX_TILE_N = 256
# Boxes of a warp: of an output in turn, and of z on its way in or out.
OUTPUT_BOXES, Z_BOXES = 2, 3
# Columns of da whose gate and up a backward epilogue works on at a time.
GATED_UNIT = 32
# An operand whose rows lie along the reduction is fetched in boxes of 64 columns: w with b_major = "n", and both
# operands of grouped-wgrad, whose reduction runs over token rows.
BOX = 64


def accumulator_registers(tile: tuple[int, int], mainloop: str) -> int:
    """float32 accumulators a thread: 128 threads (a warpgroup) own a ping-pong tile, 256 a cooperative one."""
    return tile[0] * tile[1] // (128 if mainloop == "pingpong" else 256)


def default_mainloop(tile: tuple[int, int], limits: Limits = SM90A) -> str:
    """Ping-pong where one warpgroup can hold the whole tile, else cooperative."""
    fits = tile[0] in TILE_M["pingpong"] and accumulator_registers(tile, "pingpong") <= limits.accumulator_registers
    return "pingpong" if fits else "cooperative"


def refusals(
    tile: tuple[int, int],
    cluster: tuple[int, int],
    mainloop: str,
    *,
    op: str = "grouped-gemm",
    b_major: str = "k",
    glu_layout: str = "none",
    backward: bool = False,
    recompute: bool = False,
    dbias: bool = False,
    limits: Limits = SM90A,
) -> tuple[Refusal, ...]:
    """Every rule that the combination breaks; empty when it fits."""
    found = [*_tile_m_refusals(tile, mainloop), *_tile_n_refusals(tile, op, b_major, glu_layout, backward)]
    if cluster not in CLUSTERS:
        allowed = ", ".join(f"[{m}, {n}]" for m, n in CLUSTERS)
        found.append(Refusal("cluster", f"a cluster is one of {allowed}"))
    if not found:  # the arithmetic means nothing for a tile that no main loop can run
        found += _size_refusals(
            tile, mainloop, _epilogue(tile, glu_layout, backward, recompute or dbias, limits), limits
        )
    return tuple(found)


def _tile_m_refusals(tile: tuple[int, int], mainloop: str) -> Iterator[Refusal]:
    tile_m = tile[0]
    if tile_m not in TILE_M[mainloop]:
        allowed = " or ".join(str(m) for m in TILE_M[mainloop])
        other = next((name for name in MAINLOOPS if tile_m in TILE_M[name]), None)
        remedy = f'; take mainloop = "{other}" for {tile_m}' if other else ""
        yield Refusal("tile", f"tile M = {tile_m} does not fit the {mainloop} main loop, which has {allowed}{remedy}")


def _tile_n_refusals(
    tile: tuple[int, int], op: str, b_major: str, glu_layout: str, backward: bool
) -> Iterator[Refusal]:
    tile_n = tile[1]
    if op == "grouped-wgrad":
        multiple, why = BOX, f"a box of x is {BOX} columns wide"
        given = "grouped-wgrad"
    elif backward:
        multiple, why = TILE_N[b_major, "none"]
        given = f'b_major = "{b_major}"'
        if glu_layout != "none" and multiple < GATED_UNIT:
            multiple, why = GATED_UNIT, f"gate and up of {GATED_UNIT} columns are worked on at a time"
            given += f', glu_layout = "{glu_layout}"'
    else:
        multiple, why = TILE_N[b_major, glu_layout]
        given = f'b_major = "{b_major}"' + ("" if glu_layout == "none" else f', glu_layout = "{glu_layout}"')
    if tile_n % multiple or not multiple <= tile_n <= MAX_TILE_N:
        lower = min(MAX_TILE_N, max(multiple, tile_n // multiple * multiple))
        upper = min(MAX_TILE_N, lower + multiple)
        near = f"{lower}" if lower == upper or tile_n < lower else f"{lower} or {upper}"
        yield Refusal(
            "tile",
            f"tile N = {tile_n} must be a multiple of {multiple} from {multiple} to {MAX_TILE_N} with {given} ({why}); "
            f"the nearest: {near}",
        )


def _size_refusals(tile: tuple[int, int], mainloop: str, epilogue: "_Epilogue", limits: Limits) -> Iterator[Refusal]:
    tile_m, tile_n = tile
    registers = accumulator_registers(tile, mainloop)
    if registers > limits.accumulator_registers:
        owners, remedy = 256, "take a smaller tile"
        if mainloop == "pingpong":
            owners, remedy = 128, 'take a smaller tile, or mainloop = "cooperative"'
        yield Refusal(
            "tile",
            f"{tile_m} x {tile_n} / {owners} threads = {registers} accumulator registers a thread ({mainloop}); at "
            f"most {limits.accumulator_registers} of a consumer's {limits.consumer_registers} are free; {remedy}",
        )
    stage = _stage_bytes(tile, limits)
    room = _stage_room(limits, epilogue)
    if room // stage < limits.min_stages:
        yield Refusal(
            "tile",
            f"({tile_m} + {tile_n}) x {limits.tile_k} x {limits.operand_bytes} = {stage} bytes a stage; "
            f"{limits.shared_bytes} - {limits.reserved_bytes} (bias, barriers) - "
            f"{epilogue.bytes} (epilogue) = {room} bytes of shared memory hold {room // stage} "
            f"stages, at least {limits.min_stages} are needed; "
            "take a smaller tile",
        )


def budget(
    tile: tuple[int, int],
    cluster: tuple[int, int],
    mainloop: str,
    *,
    op: str = "grouped-gemm",
    b_major: str = "k",
    glu_layout: str = "none",
    backward: bool = False,
    recompute: bool = False,
    dbias: bool = False,
    limits: Limits = SM90A,
) -> Budget:
    """The resources of one combination.

    tile, cluster: (M, N). glu_layout: "none" when the activation is not gated. backward: it is the derivative of one;
    recompute: which stores the activation too; dbias: and sums of columns. Raises SpecError, with the arithmetic, for a
    combination that does not fit.
    """
    broken = refusals(
        tile,
        cluster,
        mainloop,
        op=op,
        b_major=b_major,
        glu_layout=glu_layout,
        backward=backward,
        recompute=recompute,
        dbias=dbias,
        limits=limits,
    )
    if broken:
        raise SpecError("; ".join(refusal.rule for refusal in broken), problems=tuple(r.rule for r in broken))
    stage = _stage_bytes(tile, limits)
    epilogue = _epilogue(tile, glu_layout, backward, recompute or dbias, limits)
    stages = min(limits.max_stages, _stage_room(limits, epilogue) // stage)
    return Budget(
        tile_k=limits.tile_k,
        stages=stages,
        stage_bytes=stage,
        epilogue_box=epilogue.box,
        epilogue_bytes=epilogue.bytes,
        shared_bytes=stages * stage + epilogue.bytes + limits.reserved_bytes,
        accumulator_registers=accumulator_registers(tile, mainloop),
        consumer_registers=limits.consumer_registers,
        producer_registers=limits.producer_registers,
        threads=limits.threads,
    )


def _stage_bytes(tile: tuple[int, int], limits: Limits) -> int:
    return (tile[0] + tile[1]) * limits.tile_k * limits.operand_bytes


@dataclass(frozen=True, slots=True)
class _Epilogue:
    """Columns of a staging box at most, and the bytes of all boxes."""

    box: int
    bytes: int


def _epilogue(tile: tuple[int, int], glu_layout: str, backward: bool, outputs: bool, limits: Limits) -> _Epilogue:
    column = limits.box_column_bytes
    if backward:
        gated = glu_layout != "none"
        box = GATED_UNIT if gated else next(width for width in (64, 32, 16) if tile[1] % width == 0)
        boxes = Z_BOXES * (2 if gated else 1) + (OUTPUT_BOXES if outputs else 0)
        return _Epilogue(box, boxes * box * column)
    stage = _stage_bytes(tile, limits)
    choices = [_Epilogue(box, OUTPUT_BOXES * box * column) for box in (64, 32)]
    # 64 columns, or 32 where that makes room for one more stage.
    return max(choices, key=lambda each: (min(limits.max_stages, _stage_room(limits, each) // stage), each.box))


def _stage_room(limits: Limits, epilogue: _Epilogue) -> int:
    return limits.shared_bytes - limits.reserved_bytes - epilogue.bytes
