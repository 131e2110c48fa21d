"""What no single key can say: combinations that cannot be built, with the arithmetic that refuses them."""

from typing import Any

from fusekit.spec.budget import refusals
from fusekit.spec.model import KernelSpec
from fusekit.spec.values import show

# A TMA dimension's stride is a multiple of 16 bytes: 8 elements of 16 bits.
ALIGNED_ELEMENTS = 8

Broken = tuple[str, Any, str]  # key, its value, the rule


def broken_rules(spec: KernelSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    wgrad = spec.op == "grouped-wgrad"
    found = [*_activation(spec), *_backward(spec), *(_wgrad(spec) if wgrad else _operands(spec))]
    if any(key == "glu_layout" for key, _, _ in found):  # the tile's rules depend on it
        return found
    values = {"tile": spec.tile, "cluster": spec.cluster}
    for refusal in refusals(
        spec.tile,
        spec.cluster,
        spec.mainloop,
        op=spec.op,
        b_major=spec.b_major,
        glu_layout=spec.glu_layout,
        backward=spec.activation.backward,
        recompute=spec.recompute,
        dbias=spec.dbias,
    ):
        found.append((refusal.key, values[refusal.key], refusal.rule))
    return found + (_wgrad_problem(spec) if wgrad else _problem(spec))


def _activation(spec: KernelSpec) -> list[Broken]:
    found: list[Broken] = []
    act = spec.activation
    forward = act.kind.removeprefix("d") if act.backward else act.kind
    if act.approximate != "none" and forward not in ("gelu", "geglu"):
        found.append(
            ("activation.approximate", act.approximate, f"only gelu and geglu have it, not {act.kind}; leave it out")
        )
    if act.alpha != 1.0 and forward != "swiglu":
        found.append(("activation.alpha", act.alpha, f"only swiglu has it, not {act.kind}; leave it out"))
    if not act.gated:
        if act.limit is not None:
            found.append(
                ("activation.limit", act.limit, f"only gated activations have it, not {act.kind}; leave it out")
            )
        if act.up_offset != 0.0:
            found.append(
                ("activation.up_offset", act.up_offset, f"only gated activations have it, not {act.kind}; leave it out")
            )
        if spec.glu_layout != "none":
            rule = f'the activation {act.kind} is not gated, so there is no gate to lay out; leave it out or say "none"'
            found.append(("glu_layout", spec.glu_layout, rule))
    else:
        if act.limit is not None and act.limit <= 0:
            found.append(("activation.limit", act.limit, "must be above 0; leave it out for no limit"))
        if spec.glu_layout == "none":
            rule = f'{act.kind} is gated: say how gate and up lie along N, "concat", "interleaved" or "interleaved-32"'
            found.append(("glu_layout", spec.glu_layout, rule))
    return found


# What a backward activation does not go with, what each must be, and why.
BACKWARD_HAS_NO = (
    ("alpha", "none", "da is the plain product"),
    ("bias", False, "the bias took part in z, which the forward pass saved; its gradient is dbias"),
    ("save_preactivation", False, "it reads z and stores dz"),
)


def _backward(spec: KernelSpec) -> list[Broken]:
    """Of the derivative of an activation, and of the keys that only one has."""
    found: list[Broken] = []
    kind = spec.activation.kind
    if not spec.activation.backward:
        for key in ("recompute", "dprob", "dbias"):
            if getattr(spec, key) and not (key == "dbias" and spec.op == "grouped-wgrad"):
                rule = f'only a backward activation such as "dswiglu" has it, not {kind}; leave it out'
                found.append((key, True, rule))
        return found
    if spec.op == "grouped-wgrad":
        return found  # which has no activation at all
    for key, only, why in BACKWARD_HAS_NO:
        if getattr(spec, key) != only:
            found.append((key, getattr(spec, key), f"{kind} takes no {key}: {why}; leave it out"))
    if spec.dprob and not spec.row_scale:
        found.append(("dprob", True, "it is the gradient of row_scale, which is false; say row_scale = true"))
    if spec.out_dtype != spec.dtype and not spec.recompute:
        rule = (
            f'dz has dtype, "{spec.dtype}", and there is no y without recompute; leave it out, or say recompute = true'
        )
        found.append(("out_dtype", spec.out_dtype, rule))
    return found


def _operands(spec: KernelSpec) -> list[Broken]:
    found: list[Broken] = []
    if spec.alpha == "group" and spec.op == "dense-gemm":
        rule = 'dense-gemm has no groups to scale apart; say "scalar", or op = "grouped-gemm"'
        found.append(("alpha", spec.alpha, rule))
    if spec.out_dtype == "f32":
        rule = f'only grouped-wgrad writes float32, not {spec.op}; say "bf16" or "fp16"'
        found.append(("out_dtype", spec.out_dtype, rule))
    if spec.bias and spec.row_scale and spec.activation.kind == "identity":
        # y = p (x w + b): dprob of the backward kernels lacks dy . b, and dbias is not weighted.
        rule = (
            "a bias that row_scale multiplies has no right gradient, and neither has row_scale; leave row_scale out and"
            " let moe-unpermute multiply: weighted = true"
        )
        found.append(("row_scale", True, rule))
    if spec.accumulate:
        found.append(("accumulate", True, f"only grouped-wgrad adds to what is there, not {spec.op}; leave it out"))
    return found


# Keys of the other operations' epilogue and weights, what each must be for grouped-wgrad, and why.
WGRAD_HAS_NO = (
    ("b_major", "k", "both its operands have a row for each token, so there is no other layout"),
    ("alpha", "none", "it has no epilogue: dw is the plain sum"),
    ("bias", False, "it has no epilogue: dw is the plain sum"),
    ("save_preactivation", False, "it has no activation whose input could be stored"),
    ("row_scale", False, "its rows are those of a weight, not of tokens; scale dy or x where they are made"),
)


def _wgrad(spec: KernelSpec) -> list[Broken]:
    found: list[Broken] = []
    for key, only, why in WGRAD_HAS_NO:
        value = getattr(spec, key)
        if value != only:
            found.append((key, value, f"grouped-wgrad takes no {key}: {why}; leave it out"))
    if spec.activation.kind != "identity":
        rule = "grouped-wgrad takes no activation: it has no epilogue, dw is the plain sum; leave it out"
        found.append(("activation.kind", spec.activation.kind, rule))
    if spec.accumulate and spec.out_dtype != "f32":
        rule = f'main gradients are float32, and out_dtype is "{spec.out_dtype}"; say out_dtype = "f32"'
        found.append(("accumulate", True, rule))
    return found


def _wgrad_problem(spec: KernelSpec) -> list[Broken]:
    if spec.problem is None:
        return []
    return _aligned("problem.N", spec.problem.N, "a row of dy") + _aligned("problem.K", spec.problem.K, "a row of x")


def _problem(spec: KernelSpec) -> list[Broken]:
    problem = spec.problem
    if problem is None:
        return []
    found: list[Broken] = []
    if spec.op == "dense-gemm" and problem.E != 1:
        found.append(("problem.E", problem.E, "dense-gemm has one group; say E = 1"))
    found += _aligned("problem.K", problem.K, "a row of x")
    if spec.activation.backward and spec.glu_layout == "interleaved-32" and problem.N % 32:
        rule = "interleaved-32 alternates 32 gate and 32 up columns, so N = I is a multiple of 32"
        return [*found, ("problem.N", problem.N, f"{rule}; say {_near(problem.N, 32)}")]
    if spec.activation.backward or not spec.activation.gated:
        return found + _aligned("problem.N", problem.N, "a row of da" if spec.activation.backward else "a row of y")
    kind, half = spec.activation.kind, problem.N // 2
    if problem.N % 2:
        rule = f"{kind} is gated: N = 2 I, and {problem.N} / 2 = {problem.N / 2:g} is no whole I; say an even N"
        found.append(("problem.N", problem.N, rule))
    elif spec.glu_layout == "interleaved-32" and problem.N % 64:
        rule = "interleaved-32 alternates 32 gate and 32 up columns, so N is a multiple of 64"
        rest = f"{problem.N} = 64 x {problem.N // 64} + {problem.N % 64}"
        found.append(("problem.N", problem.N, f"{rule}, and {rest}; say {_near(problem.N, 64)}"))
    elif half % ALIGNED_ELEMENTS:
        rule = f"a row of y has N / 2 = {half} elements of 2 bytes = {2 * half} bytes, which must be a multiple of 16"
        found.append(("problem.N", problem.N, f"{rule}; say {_near(problem.N, 2 * ALIGNED_ELEMENTS)}"))
    return found


def _aligned(key: str, value: int, what: str) -> list[Broken]:
    if value % ALIGNED_ELEMENTS == 0:
        return []
    rule = f"{what} has {value} elements of 2 bytes = {2 * value} bytes, which must be a multiple of 16"
    return [(key, value, f"{rule}; say {_near(value, ALIGNED_ELEMENTS)}")]


def _near(value: int, multiple: int) -> str:
    lower = value // multiple * multiple
    return show(lower + multiple) if lower == 0 else f"{lower} or {lower + multiple}"
