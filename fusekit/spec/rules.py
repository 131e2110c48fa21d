"""Rules across fields: combinations that cannot be built, with the arithmetic that refuses them."""

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.plan.activations import Kind, kind, kinds, no_gate
from fusekit.plan.gemm import VECTOR_BYTES
from fusekit.plan.operands import BACKWARD, WGRAD, operands
from fusekit.plan.quant import BLOCK, MX_SIDE, SIDE, Quant
from fusekit.plan.quantise import AMAX, MXFP8
from fusekit.plan.tiles import refusals
from fusekit.spec.fields import Broken
from fusekit.spec.model import KernelSpec, names
from fusekit.spec.values import show

# Which only rules of the problem read; and the mapping, whose values are compared.
_NAMING = frozenset({"file", "kernel", "summary", "cluster_margin", "problem", "operands"})
_values = attrgetter(*(name for name in names(KernelSpec) if name not in _NAMING))


class _Alike(tuple[Any, ...]):
    """The values of a spec that rules read, and one of the specs that have them: kernels of a file are often alike."""

    spec: KernelSpec


def broken_rules(spec: KernelSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    alike = _Alike((*_values(spec), *spec.operands.values()))
    alike.spec = spec
    refusals = _of_kernel(alike)
    if any(field == "glu_layout" for field, _, _ in refusals):
        return [*refusals]
    return [*refusals, *_problem(spec)]


@lru_cache(maxsize=1024)
def _of_kernel(alike: _Alike) -> tuple[Broken, ...]:
    spec = alike.spec
    broken = [*_activation(spec), *_types(spec), *_quant(spec)]
    for operand in operands():
        if operand.asked(spec):
            broken += operand.rules(spec)
    if any(field == "glu_layout" for field, _, _ in broken):  # the tile's rules depend on it
        return tuple(broken)
    values = {"tile": spec.tile, "cluster": spec.cluster, "mainloop": spec.mainloop}
    for refusal in refusals(spec.plan, spec.mainloop):
        broken.append((refusal.field, values[refusal.field], refusal.rule))
    return tuple(broken)


def _activation(spec: KernelSpec) -> list[Broken]:
    refusals: list[Broken] = []
    act = spec.activation
    this = kind(act.kind)
    if act.approximate not in this.approximations:
        rule = f"only {_names(len(kind_.approximations) > 1 for kind_ in _forward())} have it, not {act.kind}"
        refusals.append(("activation.approximate", act.approximate, f"{rule}; leave it out"))
    if act.alpha != 1.0 and not this.sloped:
        rule = f"only {_names(kind_.sloped for kind_ in _forward())} has it, not {act.kind}; leave it out"
        refusals.append(("activation.alpha", act.alpha, rule))
    if not act.gated:
        for name, value, unsaid in (("limit", act.limit, None), ("up_offset", act.up_offset, 0.0)):
            if value != unsaid:
                rule = f"only gated activations have it, not {act.kind}; leave it out"
                refusals.append((f"activation.{name}", value, rule))
        if spec.glu_layout != "none":
            refusals.append(("glu_layout", spec.glu_layout, no_gate(act.kind)))
    else:
        if act.limit is not None and act.limit <= 0:
            refusals.append(("activation.limit", act.limit, "must be above 0; leave it out for no limit"))
        if spec.glu_layout == "none":
            rule = f'{act.kind} is gated: say how gate and up lie along N, "concat", "interleaved" or "interleaved-32"'
            refusals.append(("glu_layout", spec.glu_layout, rule))
    return refusals


def _forward() -> list[Kind]:
    return [kind_ for kind_ in kinds().values() if not kind_.backward]


def _names(chosen: Iterable[bool]) -> str:
    """The forward activations for which the flag is set, in words."""
    return " and ".join(kind_.name for kind_, flag in zip(_forward(), chosen, strict=True) if flag)


def _types(spec: KernelSpec) -> list[Broken]:
    """The rules of dtypes and layouts, whatever operands there are."""
    kind_, refusals = spec.activation.kind, []
    if spec.epilogue == WGRAD:
        if spec.b_major != "k":
            why = "both its operands have a row for each token, so there is no other layout"
            refusals.append(("b_major", spec.b_major, f"{spec.op} takes no b_major: {why}; leave it out"))
        if kind_ != "identity":
            rule = f"{spec.op} takes no activation: it has no epilogue, dw is the plain sum; leave it out"
            refusals.append(("activation.kind", kind_, rule))
    elif spec.epilogue == BACKWARD and spec.out_dtype == "f32":
        rule = f'{kind_} gives dz and y in 16 bits; say "bf16" or "fp16"'
        refusals.append(("out_dtype", spec.out_dtype, rule))
    elif spec.epilogue == BACKWARD and spec.out_dtype != spec.dtype and not spec.operands["recompute"]:
        rule = (
            f'dz has dtype, "{spec.dtype}", and there is no y without recompute; leave it out, or say recompute = true'
        )
        refusals.append(("out_dtype", spec.out_dtype, rule))
    return refusals


def _quant(spec: KernelSpec) -> list[Broken]:
    """Keys of the recipe that nothing is there for."""
    quant, usual = spec.quant, Quant()
    sides = (
        ("in", quant.coded_inputs, quant.inputs, BLOCK, ("x_format", "accumulation", "x_blocks")),
        ("out", quant.coded, quant.out, BLOCK, ("transpose", "keep")),
        ("out", quant.by_blocks, quant.out, BLOCK, ("scales",)),
        ("out", quant.mx, quant.out, MXFP8, ("scale_layout", "group_alignment")),
        ("out", quant.largest, quant.out, AMAX, ("rht_amax",)),
        ("transpose", quant.transpose, False, True, ("y_blocks", "dz_blocks")),
        ("out", quant.by_blocks or not quant.transpose, quant.out, BLOCK, ("y_blocks", "dz_blocks")),
    )
    return [
        (
            f"quant.{name}",
            getattr(quant, name),
            f"it is about {field}, which is {show(none)}; say {field} = {show(one)}",
        )
        for field, there, none, one, names_ in sides
        for name in names_
        if not there and getattr(quant, name) != getattr(usual, name)
    ]


def _problem(spec: KernelSpec) -> list[Broken]:
    problem = spec.problem
    if problem is None:
        return []
    refusals: list[Broken] = []
    if problem.E == 0:
        shape = {"M": problem.M, "N": problem.N, "K": problem.K}
        refusals.append(("problem", shape, f"has no E; {spec.op} has groups: say how many, as E or experts"))
    if not spec.grouped and problem.E != 1:
        refusals.append(("problem.E", problem.E, f"{spec.op} has one group; say E = 1"))
    if spec.epilogue == WGRAD:
        size = spec.plan.element
        refusals += _aligned("problem.N", problem.N, "a row of dy", size)
        return refusals + _aligned("problem.K", problem.K, "a row of x", size)
    factor = "w" if spec.plan.quant.weights_alone else "x"
    if spec.plan.quant.mx_weights and problem.K % spec.plan.vector:
        rule = f"a step reads two scales of {MX_SIDE} values of w, so K is a multiple of {spec.plan.vector}"
        refusals.append(("problem.K", problem.K, f"{rule}; say {_near(problem.K, spec.plan.vector)}"))
    elif not spec.plan.quant.mx_weights:
        refusals += _aligned("problem.K", problem.K, f"a row of {factor}", spec.plan.w_element)
    if spec.activation.backward and spec.glu_layout == "interleaved-32" and problem.N % 32:
        rule = "interleaved-32 alternates 32 gate and 32 up columns, so N = I is a multiple of 32"
        return [*refusals, ("problem.N", problem.N, f"{rule}; say {_near(problem.N, 32)}")]
    if spec.activation.backward and spec.glu_layout == "concat" and spec.plan.quant.coded and problem.N % SIDE:
        rule = f"a block of {SIDE} columns of dz has gates alone or ups alone, so N = I is a multiple of {SIDE}"
        return [
            *refusals,
            ("problem.N", problem.N, f'{rule}; say {_near(problem.N, SIDE)}, or glu_layout = "interleaved"'),
        ]
    plan = spec.plan
    columns = plan.columns[str(plan.width)]
    size = 1 if plan.quant.coded else DTYPES[spec.out_dtype].bytes
    if spec.activation.backward or not spec.activation.gated:
        what, size = ("a row of da", 2) if spec.activation.backward else ("a row of y", size)
        return refusals + _aligned("problem.N", problem.N, what, size, columns)
    kind = spec.activation.kind
    if problem.N % 2:
        rule = f"{kind} is gated: N = 2 I, and {problem.N} / 2 = {problem.N / 2:g} is no whole I; say an even N"
        refusals.append(("problem.N", problem.N, rule))
    elif spec.glu_layout == "interleaved-32" and problem.N % 64:
        rule = "interleaved-32 alternates 32 gate and 32 up columns, so N is a multiple of 64"
        rest = f"{problem.N} = 64 x {problem.N // 64} + {problem.N % 64}"
        refusals.append(("problem.N", problem.N, f"{rule}, and {rest}; say {_near(problem.N, 64)}"))
    else:
        refusals += _aligned("problem.N", problem.N, "a row of y", size, columns, share=2)
    return refusals


def _aligned(field: str, value: int, what: str, size: int, multiple: int = 0, share: int = 1) -> list[Broken]:
    """The rule that a row of `value` / `share` elements of `size` bytes fills 16 bytes, or is a `multiple` of them."""
    count, multiple = value // share, multiple or VECTOR_BYTES // size
    if count % multiple == 0:
        return []
    rule = f"{what} has {f'N / {share} = ' if share > 1 else ''}{count} elements"
    if multiple * size == VECTOR_BYTES:
        unit = f"{size} byte{'s' if size > 1 else ''}"
        rule += f" of {unit} = {size * count} bytes, which must be a multiple of {VECTOR_BYTES}"
    else:
        rule += f", and this kernel takes multiples of {multiple}"
    return [(field, value, f"{rule}; say {_near(value, share * multiple)}")]


def _near(value: int, multiple: int) -> str:
    lower = value // multiple * multiple
    return show(lower + multiple) if lower == 0 else f"{lower} or {lower + multiple}"
