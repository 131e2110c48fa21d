"""Specs and plans of GEMMs for tests, from a few keys."""

import json
from dataclasses import replace
from functools import cache

from fusekit.plan.activations import kinds
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.layer import Options, Program, program
from fusekit.plan.layer.ranks import room
from fusekit.plan.quant import Quant
from fusekit.plan.tiles import default_mainloop
from fusekit.spec import Activation, KernelSpec, parse_text

(PLAIN,) = parse_text(
    'schema = 1\n[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n'
    'tile = [128, 128]\ncluster = [1, 1]\nschedule = "static"\n',
    "t",
    "t.toml",
)


def gemm_spec(*, glu_layout: str = "none", kind: str | None = None, backward: bool = False, **changes) -> KernelSpec:
    """A plain grouped GEMM but for the changes, not validated; a layout of gates makes it a swiglu."""
    if kind is None:
        kind = ("dsrelu" if backward else "identity") if glu_layout == "none" else ("dswiglu" if backward else "swiglu")
    if "tile" in changes:
        changes = {"mainloop": default_mainloop(changes["tile"])} | changes
    if isinstance(changes.get("quant"), str):
        changes = changes | {"quant": Quant.of(changes["quant"])}
    operands = {name: changes.pop(name) for name in PLAIN.operands.keys() & changes}
    return replace(
        PLAIN, activation=Activation(kind), glu_layout=glu_layout, operands=PLAIN.operands | operands, **changes
    )


def value_of(spec: KernelSpec, key: str):
    """What a spec has for a key of a spec file."""
    return spec.operands[key] if key in spec.operands else getattr(spec, key)


def gemm_plan(**changes) -> GemmPlan:
    """Its plan."""
    return gemm_spec(**changes).plan


PLAIN_ACTIVATIONS = tuple(each.name for each in kinds().values() if not each.backward and not each.gated)
GATED_ACTIVATIONS = tuple(each.name for each in kinds().values() if not each.backward and each.gated)
BACKWARD_ACTIVATIONS = tuple(each.name for each in kinds().values() if each.backward)
ACTIVATIONS = tuple(kinds())


def plan_of(layer) -> Program:
    """The program that the record of a layer was made from."""
    plan, options = _program(json.dumps(layer.options.canonical()))
    return plan.within(room(options, layer.capacity, layer.rows)) if options.ranks > 1 else plan


@cache
def _program(table: str) -> tuple[Program, Options]:
    options = Options(**json.loads(table))
    return program(options), options
