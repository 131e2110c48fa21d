"""Which keys an operation takes, and what makes a spec of them: GEMMs are one family, the others one each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan.arch import ARCHITECTURES
from fusekit.plan.operands import keys as operand_keys
from fusekit.plan.operations import provided
from fusekit.plan.quant import quant
from fusekit.plan.quant import text as quant_text
from fusekit.plan.tiles import default_mainloop
from fusekit.spec import exchange, extern, permutation, quantise, router
from fusekit.spec.exchange import ExchangeSpec
from fusekit.spec.extern import EXTERN, ExternSpec
from fusekit.spec.keys import KERNEL_KEYS, KERNEL_ONLY, SWEEP_KEYS, Broken, Key
from fusekit.spec.model import OPS, Activation, KernelSpec, Problem
from fusekit.spec.permutation import PermutationSpec
from fusekit.spec.quantise import QUANTISE, QuantiseSpec
from fusekit.spec.router import RouterSpec
from fusekit.spec.rules import broken_rules
from fusekit.spec.sweep import CANDIDATES
from fusekit.spec.token import TokenProblem

__all__ = [
    "ExchangeSpec",
    "ExternSpec",
    "Family",
    "PermutationSpec",
    "RouterSpec",
    "Spec",
    "TokenProblem",
    "families",
    "family_of",
    "layer_name",
    "layer_of",
]

Spec = KernelSpec | RouterSpec | PermutationSpec | ExchangeSpec | QuantiseSpec | ExternSpec
ALL_OPS = (*OPS, *router.ROUTER_OPS, *permutation.PERMUTATION_OPS, *exchange.EXCHANGE_OPS, QUANTISE, EXTERN)
OP_DOC = "The operation."
ROUTER_OWN = (*KERNEL_ONLY, "dtype", "out_dtype")


@dataclass(frozen=True, slots=True)
class Family:
    """Operations that share a table of keys.

    planner: dotted name of the module that builds them, with `plan(spec) -> TracePlan`, where it is not fusekit's; it
    is imported where a kernel is compiled. make: (file stem, values by key, one value of each sweep key) -> a spec.
    broken: the rules that a spec breaks, as (key, value, rule). own: keys that [defaults] does not give it. candidates:
    what a sweep key that is left out is chosen from (see fusekit.spec.sweep). expand: stands for `sweep.expand`, for
    tables that make several kernels, `most` at most.
    """

    ops: tuple[str, ...]
    keys: tuple[Key, ...]
    sweep_keys: tuple[str, ...]
    make: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Any]
    broken: Callable[[Any], list[Broken]]
    own: tuple[str, ...] = KERNEL_ONLY
    candidates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    planner: str = ""
    expand: Callable[[str, Mapping[str, Any]], Any] | None = None
    most: int = 1

    @property
    def defaults_keys(self) -> tuple[Key, ...]:
        """The keys that [defaults] may give."""
        return tuple(key for key in self.keys if key.name not in self.own)


@cache
def families() -> tuple[Family, ...]:
    """Every family; the first is what an unknown operation is read as."""
    gemm = Family(OPS, _with_op(KERNEL_KEYS), SWEEP_KEYS, _make_gemm, broken_rules, candidates=CANDIDATES)
    token_wise = (
        # The dtype of a file's GEMMs says nothing of logits, whose rounding changes which experts are chosen.
        (router.ROUTER_KEYS, router.make, router.broken_router_rules, ROUTER_OWN),
        (permutation.PERMUTATION_KEYS, permutation.make, permutation.broken_permutation_rules, KERNEL_ONLY),
        (exchange.EXCHANGE_KEYS, exchange.make, exchange.broken_exchange_rules, KERNEL_ONLY),
        ({QUANTISE: quantise.QUANTISE_KEYS}, quantise.make, quantise.broken_quantise_rules, KERNEL_ONLY),
    )
    others = (
        Family((op,), _with_op(keys), router.ROUTER_SWEEP_KEYS, make, broken, own)
        for table, make, broken, own in token_wise
        for op, keys in table.items()
    )
    foreign = Family(
        (EXTERN,), _with_op(extern.EXTERN_KEYS), ("arch", "sweep"), extern.make, extern.broken_extern_rules
    )
    return (gemm, *others, foreign)


def family_of(op: Any) -> Family:
    """The family of an operation; the first for what is none, so that its error names every operation."""
    every = families()
    if not isinstance(op, str):
        return every[0]
    found = next((family for family in every if op in family.ops), None) or outside(op)
    return found or every[0]


@cache
def outside(op: str) -> Family | None:
    """The family of an operation of another package; None for one that no package has."""
    found = provided(op)
    if found is None:
        return None
    if not isinstance(found, Family) or op not in found.ops or not found.planner:
        raise SpecError(f"op {op!r}: its entry point gives {found!r}; it must give a Family that has it and a planner")
    return replace(found, keys=_with_op(found.keys, found.ops))


def layer_of(spec: Any) -> Any:
    """The options of the layer that the kernel `spec` is a part of; None where it is none."""
    return getattr(spec, "layer", None)


def layer_name(spec: Any) -> str:
    """`file/layer` of the layer that the kernel `spec` is a part of; empty where it is none."""
    return "" if layer_of(spec) is None else str(spec.name.rpartition(".")[0])


def _with_op(keys: tuple[Key, ...], more: tuple[str, ...] = ()) -> tuple[Key, ...]:
    op = Key("op", "choice", OP_DOC, choices=(*ALL_OPS, *more), required=True)
    others = [key for key in keys if key.name != "op"]
    return (*others[:2], op, *others[2:])


def _make_gemm(stem: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> KernelSpec:
    activation = Activation(**(values["activation"] or {}))
    problem = Problem(**values["problem"]) if values["problem"] else None
    tile = choice["tile"]
    told = quant_text(values["quant"])
    recipe = quant(told)
    shared = recipe.promoted or recipe.transpose
    arch = ARCHITECTURES[choice["arch"]]
    mainloop = choice["mainloop"] or ("cooperative" if shared else default_mainloop(tile, arch))
    return KernelSpec(
        file=stem,
        kernel=values["name"],
        op=values["op"],
        arch=choice["arch"],
        dtype=values["dtype"],
        out_dtype=values["out_dtype"] or values["dtype"],
        b_major=values["b_major"],
        activation=activation,
        glu_layout=values["glu_layout"] or ("concat" if activation.gated else "none"),
        quant=told,
        tile=tile,
        cluster=choice["cluster"],
        mainloop=mainloop,
        schedule=choice["schedule"],
        cluster_margin=values["cluster_margin"],
        problem=problem,
        summary=values["summary"],
        **{key.name: values[key.name] for key in operand_keys()},
    )
