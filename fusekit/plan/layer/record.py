"""The record of a layer from its program, and the proof that both launch alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fusekit.abi.expr import Expr, evaluate
from fusekit.abi.layer_enough import Enough
from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH, LayerBuffer, LayerPass, LayerStep
from fusekit.abi.layer_record import Ladder, LayerLaunch, LayerRecord
from fusekit.errors import FusekitError
from fusekit.plan.exchange import (
    CHOICE_SENDERS,
    CHOICES,
    CHUNK,
    GRAIN,
    HEADER,
    LINE,
    NOTHING,
    PER_LINE,
    SENDERS,
    of_row,
    regions,
    waiting,
)
from fusekit.plan.exchange import parts as token_parts
from fusekit.plan.layer.options import Options
from fusekit.plan.layer.passes import program
from fusekit.plan.layer.program import BACKWARD, QUANTISE, Program, Step
from fusekit.plan.layer.ranks import room, stores, window_sizes
from fusekit.plan.quant import SIDE

MOST = 1 << 18  # tokens of the last rung of a ladder that is asked for
_TRIALS = 24  # calls of each pass
_BY_TILE = ("dprob",)  # operands that sum a row tile by tile; all others add up in an order that no tile changes
_WORDS = {
    "x": "the tokens", "y": "the results", "router": "the router's weights", "router_bias": "the router's biases",
    "expert_bias": "what is added to scores for the choice alone", "w1": "weights of the first projection",
    "w2": "weights of the second projection", "b1": "biases of the first projection",
    "b2": "biases of the second projection", "shared_w1": "weights of the shared expert's first projection",
    "shared_w2": "weights of the shared expert's second projection",
    "shared_gate": "weights of the shared expert's gate", "residual": "what is added to the results",
    "logits": "the router's logits", "indices": "the experts of each token", "weights": "the weight of each choice",
}  # fmt: skip
_FORMS = {"q": "FP8 values", "s": "scales", "t": "FP8 values for the transpose", "ts": "scales for the transpose"}
Choose = Callable[[str, int], str]


def layer_record(options: Options, arch: str, choose: Choose, summary: str = "") -> LayerRecord:
    """The record of a layer. choose: the key of a part's kernel for so many tokens.

    Raises FusekitError if the record's launches are not the program's.
    """
    plan = program(options)
    record = unproved(options, arch, choose, summary, plan)
    prove(record, plan, options)
    return record


def unproved(
    options: Options, arch: str, choose: Choose, summary: str = "", plan: Program | None = None
) -> LayerRecord:  # fmt: skip
    """`layer_record`, without its proof. plan: the layer's program, if it is at hand."""
    plan = plan or program(options)
    one = [part for part, keys in plan.parts.items() if pinned(keys)]
    windows, offsets = _windows(options, plan)
    record = LayerRecord(
        f"{options.file}/{options.name}", arch, _dims(options, plan),
        {name: LayerBuffer(each.dtype, each.shape, each.place, offsets.get(name, 0), words(name, each.place))
         for name, each in plan.buffers.items()},
        {which: _pass(plan, which) for which in plan.steps},
        {part: ((None, choose(part, options.tokens)),) if part in one else ladder_of(part, within(plan, choose))
         for part in plan.parts},
        "S" if plan.room_for else "T", summary, options.canonical(),
        {"deterministic": True, "batch_invariant": True, "pinned": one}, windows=windows,
        limits=_limits(options, plan),
    )  # fmt: skip
    record.check()
    return record


def pinned(keys: Mapping[str, Any]) -> bool:
    """Whether the bits of a row's results depend on the variant. keys: of a kernel's table."""
    return any(keys.get(name) for name in _BY_TILE)


def words(name: str, place: str) -> str:
    """What an argument holds."""
    if place != ARGUMENT:
        return ""
    stem, _, form = name.rpartition("_")
    if form in _FORMS and stem in _WORDS:
        return f"{_FORMS[form]} of {stem}"
    if name in _WORDS:
        return _WORDS[name]
    return f"gradient of {name[1:]}" if name.startswith("d") and name[1:] in _WORDS else ""


def _windows(options: Options, plan: Program) -> tuple[dict[str, Expr], dict[str, Expr]]:
    """Bytes of each window, and where buffers begin in theirs."""
    sizes: dict[str, Expr] = {}
    offsets: dict[str, Expr] = {}
    for window, part in stores(plan).items():
        keys = plan.parts[part]
        indices, weights = token_parts(keys)
        row, scales = of_row(keys, options.hidden)
        fixed = HEADER + (options.ranks * CHOICE_SENDERS * 4 if indices else 0)

        def after(slot: int, fixed: int = fixed) -> Expr:
            flags = ("mul", LINE, ("ceildiv", "S", PER_LINE))
            return ("add", fixed, flags, ("mul", "S", slot)) if slot else ("add", fixed, flags)

        begins = {"indices": 0, "weights": indices, "rows": indices + weights, "scales": indices + weights + row}
        offsets |= {f"{window}.{name}": after(slot) for name, slot in begins.items()}
        sizes[window] = after(indices + weights + row + scales)
    return sizes, offsets


def _limits(options: Options, plan: Program) -> dict[str, Expr]:
    together = [keys for keys in plan.parts.values() if "ranks" in keys]
    if options.ranks == 1:
        return {}
    grains: Expr = ("ceildiv", "capacity", GRAIN)
    waits = [
        ("add", int(keys.get("blocks", SENDERS[keys["op"]])), ("floordiv", "capacity", CHUNK))
        if keys["op"] == "moe-combine"
        else ("add", int(keys.get("blocks", SENDERS[keys["op"]])), 1)
        for keys in together
    ]
    return {
        "capacity": ("mul", GRAIN, ("ceildiv", "tokens", GRAIN)),
        "rows": ("mul", options.ranks * GRAIN * min(options.topk, options.local), grains),
        "waiting": ("max", 0, *waits),
    }


def _dims(options: Options, plan: Program) -> dict[str, Expr]:
    rows: Expr = ("mul", "T", plan.topk)
    dims: dict[str, Expr] = {"M": rows, "C": rows}
    if options.ranks > 1:
        slots = ("mul", options.ranks * GRAIN, ("ceildiv", "capacity", GRAIN))
        dims = {"S": slots, "F": ("add", HEADER // 4, ("floordiv", "S", CHUNK)), "M": "rows", "C": rows}
    if QUANTISE in plan.steps:
        for name, groups in (("T", 0), ("M", plan.experts)):
            blocks = ("max", ("ceildiv", ("add", name, (SIDE - 1) * groups), SIDE), 1)
            dims |= {f"{name}_blocks": blocks, f"{name}_padded": ("mul", f"{name}_blocks", SIDE)}
    return dims


def within(plan: Program, choose: Choose) -> Callable[[str, int], str | None]:
    """`choose`, where the program launches a part for so many tokens; else None."""
    return lambda part, tokens: choose(part, tokens) if plan.launches(part, tokens) else None


def ladder_of(part: str, choose: Callable[[str, int], str | None]) -> Ladder:
    """The kernels of a part, each with the most tokens that it is for; None: it is not launched."""
    counts = [1 << power for power in range(MOST.bit_length())]
    keys = [choose(part, count) for count in counts]
    rungs: list[tuple[int | None, str | None]] = []
    for index in range(len(counts) - 1):
        low, high = counts[index], counts[index + 1]
        if keys[index] != keys[index + 1]:
            while high - low > 1:  # the most tokens that the first is for
                middle = (low + high) // 2
                low, high = (middle, high) if choose(part, middle) == keys[index] else (low, middle)
            rungs.append((low, keys[index]))
    return (*rungs, (None, keys[-1]))


def _pass(plan: Program, which: str) -> LayerPass:
    inputs, outputs = plan.arguments(which)
    needed = {output: plan.needed(which, {output}) for output in outputs}
    always = plan.needed(which, ())

    def step(each: Step) -> LayerStep:
        keys = plan.parts[each.part]
        wanted = None if each in always else frozenset(name for name, steps in needed.items() if each in steps)
        return LayerStep(
            each.part, each.arguments, tuple(each.writes.values()), wanted, each.needs, each.spared, each.window,
            each.on_side, bool(keys.get("awaits")), keys.get("sends") in (CHOICES, NOTHING),
        )  # fmt: skip

    steps = plan.steps[which]
    overwrites = which == BACKWARD and bool(steps)
    layouts = [layout for in_place in ((False, True) if overwrites else (False,))
               for layout in plan.layouts(which, in_place)]  # fmt: skip
    order = map(id, plan.in_place_order(list(steps))) if overwrites else ()
    positions = {id(each): index for index, each in enumerate(steps)}
    added = {name for each in steps if plan.parts[each.part].get("accumulate") for name in each.writes.values()}
    return LayerPass(
        tuple(inputs), tuple(outputs), tuple(map(step, steps)), tuple(layouts), tuple(positions[key] for key in order),
        tuple(sorted(added.intersection(outputs))),
    )  # fmt: skip


def prove(record: LayerRecord, plan: Program, options: Options) -> None:
    """Raises FusekitError unless the record, as it is read from its JSON, launches what the program launches: for
    random tokens, outputs, lent memory and orders.
    """
    read, rng = LayerRecord.from_json(record.to_json()), random.Random(record.name)
    for which in (which for which, steps in plan.steps.items() if steps):
        for tokens, asked, lent, in_place in _calls(plan, which, rng):
            limits, there = dict[str, int](), plan
            if options.ranks > 1:
                limits = {"capacity": tokens + rng.randrange(3 * GRAIN)}
                rows = room(options, limits["capacity"])["M"]
                limits["rows"] = rng.choice([rows, max(rows // 3, 1)])
                there = plan.within(room(options, limits["capacity"], limits["rows"]))
                _same_windows(read, there, options, limits["capacity"])
            env, dims = read.environment(tokens, **limits), there.dims(tokens)
            what = f"{record.name}: {which} of {tokens} tokens, {', '.join(sorted(asked))}"
            launches = read.launches(which, env, asked, lent, in_place=in_place)
            _same({name: env[name] for name in dims}, dims, f"{what}: dims")
            _same(launches, [*_launches(read, there, which, dims, env, asked, lent, in_place)], what)
            _same(read.kept(env), there.kept(dims), f"{what}: kept memory")
            size = read.scratch(which, asked, env, lent, in_place=in_place)[1]
            _same(size, there.scratch(which, asked, dims, lent, in_place=in_place)[1], f"{what}: scratch memory")
            if lent != asked:
                continue
            for outputs in (None, frozenset(asked)):  # what a caller allocates; not less than for these tokens alone
                enough = Enough(read, which, outputs, in_place, limits)
                if size > enough.at(tokens) and size > enough.up_to(tokens):
                    raise FusekitError(f"{what}: {size} bytes of scratch memory are more than is enough; report this")


def _same_windows(record: LayerRecord, plan: Program, options: Options, tokens: int) -> None:
    capacity = evaluate(record.limits["capacity"], {"tokens": tokens})
    given = {"capacity": capacity}
    _same(capacity, plan.room["S"] // options.ranks, f"{record.name}: capacity")
    _same(evaluate(record.limits["rows"], given), room(options, tokens)["M"], f"{record.name}: rows")
    most = max(waiting(keys, capacity) for keys in plan.parts.values() if "ranks" in keys)
    _same(evaluate(record.limits["waiting"], given), most, f"{record.name}: blocks that wait")
    sizes = {name: evaluate(size, plan.room) for name, size in record.windows.items()}
    _same(sizes, window_sizes(plan, options), f"{record.name}: windows")
    for window, part in stores(plan).items():
        keys = plan.parts[part]
        row, scales = of_row(keys, options.hidden)
        begins = regions(capacity, row, options.ranks, *token_parts(keys), scales)._asdict()
        for name, buffer in record.buffers.items():
            if buffer.place == window and (begin := begins.get(name.partition(".")[2])) is not None:
                _same(evaluate(buffer.offset, plan.room), begin, f"{record.name}: {name}")


def _calls(plan: Program, which: str, rng: random.Random) -> Iterator[tuple[int, set[str], set[str], bool]]:
    """Tokens, outputs, those in contiguous memory, whether kept memory is overwritten."""
    outputs = sorted(plan.arguments(which)[1])
    for trial in range(_TRIALS):
        asked = {name for name in outputs if rng.random() < 0.6} or {*outputs}
        lent = asked if trial % 2 else {name for name in asked if rng.random() < 0.5}
        yield int(2 ** rng.uniform(0, 17)), asked, lent, which == BACKWARD and rng.random() < 0.5


def _launches(
    record: LayerRecord, plan: Program, which: str, dims: Mapping[str, int], env: Mapping[str, int], asked: set[str],
    lent: set[str], in_place: bool,
) -> Iterator[LayerLaunch]:  # fmt: skip
    """The program's own launches."""
    tokens = env.get("capacity", env["T"])
    steps = [step for step in plan.needed(which, asked, in_place=in_place) if plan.launches(step.part, tokens)]
    scratch, kept = plan.scratch(which, asked, dims, lent, in_place=in_place)[0], plan.kept(dims)[0]

    def place(name: str) -> tuple[str, int]:
        if name in asked or name in plan.arguments(which)[0]:
            return name, 0
        if plan.buffers[name].place not in (ARGUMENT, KEPT, SCRATCH):
            return plan.buffers[name].place, 0
        return scratch[name] if name in scratch else (KEPT, kept[name])

    for step, joins in zip(steps, plan.joins(steps), strict=True):
        yield LayerLaunch(
            step.part, record.kernel(step.part, tokens) or "",
            {argument: place(name) for argument, name in step.arguments.items()},
            {argument: plan.buffers[name].extents(dims) for argument, name in step.arguments.items()}, joins,
        )  # fmt: skip


def _same(one: Any, other: Any, what: str) -> None:
    if one != other:
        raise FusekitError(f"{what}: the record gives {one!r}, and the layer's program {other!r}; report this")
