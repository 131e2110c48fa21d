"""Which tiles fit an SM, and why others do not."""

from collections.abc import Iterator
from dataclasses import dataclass

from fusekit.plan.arch import DEFAULT, Architecture
from fusekit.plan.gemm import GATED_UNIT, MIN_STAGES, GemmPlan

SWAPPED = "swap-ab"
MAINLOOPS = ("pingpong", "cooperative", SWAPPED)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
GLU_LAYOUTS = ("concat", "interleaved", "interleaved-32")

# (b_major, glu_layout) -> what tile N is a multiple of, and why.
TILE_N = {
    ("k", "none"): (16, "an epilogue step has 16 columns"),
    ("k", "concat"): (32, "the gate half and the up half are multiples of 16 each"),
    ("k", "interleaved"): (32, "gate and up columns are multiples of 16 each"),
    ("k", "interleaved-32"): (64, "a gate block and an up block have 32 columns each"),
    ("n", "none"): (64, "an n-major box is 64 columns wide"),
    ("n", "concat"): (128, "gate and up are n-major boxes, 64 columns wide each"),
    ("n", "interleaved"): (64, "an n-major box is 64 columns wide"),
    ("n", "interleaved-32"): (64, "an n-major box is 64 columns wide"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a combination cannot be built: the field to change, and the rule with its arithmetic."""

    field: str
    rule: str


def owners(mainloop: str, arch: Architecture = DEFAULT) -> int:
    """Threads that work on a tile: all consumers (cooperative), else one warpgroup."""
    return arch.warpgroup * (arch.consumer_warpgroups if mainloop == "cooperative" else 1)


def accumulators(tile: tuple[int, int], mainloop: str, arch: Architecture = DEFAULT) -> int:
    """float32 accumulators a thread."""
    return tile[0] * tile[1] // owners(mainloop, arch)


def default_mainloop(tile: tuple[int, int], arch: Architecture = DEFAULT) -> str:
    """Swapped for a tile of few rows; ping-pong where one warpgroup can hold the whole tile, else cooperative."""
    if tile[0] in arch.tile_rows[SWAPPED]:
        return SWAPPED
    fits = tile[0] in arch.tile_rows["pingpong"] and accumulators(tile, "pingpong", arch) <= arch.accumulator_registers
    return "pingpong" if fits else "cooperative"


def refusals(plan: GemmPlan, mainloop: str) -> tuple[Refusal, ...]:
    """Every rule that the plan's tile and cluster break; empty when it fits."""
    broken = [*_tile_m(plan, mainloop), *_tile_n(plan), *_swapped(plan)]
    if plan.cluster not in CLUSTERS:
        allowed = ", ".join(f"[{m}, {n}]" for m, n in CLUSTERS)
        broken.append(Refusal("cluster", f"a cluster is one of {allowed}"))
    if not broken:  # the arithmetic means nothing for a tile that no main loop can run
        broken += [*_registers(plan, mainloop), *_stages(plan)]
    return tuple(broken)


def _tile_m(plan: GemmPlan, mainloop: str) -> Iterator[Refusal]:
    tile_m, rows = plan.tile[0], plan.arch.tile_rows
    if plan.quant.weights_alone and mainloop == SWAPPED:
        rows = {**rows, SWAPPED: (*rows[SWAPPED], plan.arch.mma_rows)}
    if tile_m not in rows[mainloop]:
        allowed = " or ".join(str(m) for m in rows[mainloop])
        other = next((name for name in MAINLOOPS if tile_m in rows[name]), None)
        remedy = f'; take mainloop = "{other}" for {tile_m}' if other else ""
        yield Refusal("tile", f"tile M = {tile_m} does not fit the {mainloop} main loop, which has {allowed}{remedy}")


def _swapped(plan: GemmPlan) -> Iterator[Refusal]:
    if not plan.swapped:
        return
    if plan.epilogue != "forward" or plan.quant.coded_inputs or not plan.quant.wide:
        rows = sorted({row for loop, heights in plan.arch.tile_rows.items() if loop != SWAPPED for row in heights})
        yield Refusal(
            "mainloop",
            "it multiplies 16-bit factors, and has a forward epilogue without FP8 output; take tile M = "
            f"{' or '.join(map(str, rows))}",
        )
    if plan.cluster_size > 1:
        yield Refusal("cluster", f'mainloop = "{SWAPPED}" has tiles of few rows, which CTAs do not share; say [1, 1]')


def _tile_n(plan: GemmPlan) -> Iterator[Refusal]:
    tile_n, most = plan.tile[1], plan.arch.max_tile_n
    if plan.gathers and not plan.quant.coded:  # FP8 values of a gated y need 256 columns, in two waves
        most = plan.arch.gather_tile_n
    if plan.wgrad:
        multiple, why = plan.arch.box, f"a box of x is {plan.arch.box} columns wide"
        given = plan.spec.op
    elif plan.backward:
        multiple, why = TILE_N[plan.b_major, "none"]
        given = f'b_major = "{plan.b_major}"'
        if plan.kind.gated and multiple < GATED_UNIT:
            multiple, why = GATED_UNIT, f"gate and up of {GATED_UNIT} columns are worked on at a time"
            given += f', glu_layout = "{plan.glu_layout}"'
    else:
        multiple, why = TILE_N[plan.b_major, plan.glu_layout]
        if plan.swapped and multiple < plan.arch.mma_rows:
            multiple, why = plan.arch.mma_rows, f"a swapped product has {plan.arch.mma_rows} rows of w"
        given = f'b_major = "{plan.b_major}"' + (f', glu_layout = "{plan.glu_layout}"' if plan.kind.gated else "")
    if plan.gathers:
        given += f', gather = "{plan.gather}"'
    if tile_n % multiple or not multiple <= tile_n <= most:
        lower = min(most, max(multiple, tile_n // multiple * multiple))
        upper = min(most, lower + multiple)
        near = f"{lower}" if lower == upper or tile_n < lower else f"{lower} or {upper}"
        yield Refusal(
            "tile",
            f"tile N = {tile_n} must be a multiple of {multiple} from {multiple} to {most} with {given} ({why}); "
            f"the nearest: {near}",
        )


def _registers(plan: GemmPlan, mainloop: str) -> Iterator[Refusal]:
    tile_m, tile_n = plan.tile
    most, registers = plan.accumulator_registers, plan.accumulators
    if registers > most and plan.quant.promoted:
        yield Refusal(
            "tile",
            f"({tile_m} / 2 + {plan.arch.mma_rows // plan.waves}) x {tile_n} / {plan.arch.warpgroup} threads ="
            f" {registers} accumulator registers a thread (promoted); at most {most} of a consumer's "
            f"{plan.arch.consumer_registers} are free; take a smaller tile",
        )
    elif registers > most:
        consumer = plan.registers[1] if plan.gathers else plan.arch.consumer_registers
        remedy = 'take a smaller tile, or mainloop = "cooperative"' if plan.pingpong else "take a smaller tile"
        threads = owners("pingpong" if plan.pingpong else "cooperative", plan.arch)
        yield Refusal(
            "tile",
            f"{tile_m} x {tile_n} / {threads} threads = {registers} accumulator registers a thread ({mainloop}); at "
            f"most {most} of a consumer's {consumer} are free; {remedy}",
        )


def _stages(plan: GemmPlan) -> Iterator[Refusal]:
    if plan.stages < MIN_STAGES:
        tile_m, tile_n = plan.tile
        stage, epilogue = plan.stage_bytes, plan.warp_bytes * plan.consumer_warps
        rest = plan.layout(MIN_STAGES, plan.warp_bytes).bytes - MIN_STAGES * stage - epilogue
        yield Refusal(
            "tile",
            f"({tile_m} + {tile_n}) x {plan.tile_k} x {plan.element} = {stage} bytes a stage; {MIN_STAGES} of them, at "
            f"least, {epilogue} (epilogue) and {rest} (operands, barriers) are more than the {plan.arch.shared_bytes} "
            "bytes of shared memory; take a smaller tile",
        )
