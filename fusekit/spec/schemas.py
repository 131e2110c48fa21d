"""Which fields each operation takes, and what makes a spec of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from fusekit.plan.arch import ARCHITECTURES
from fusekit.plan.operands import fields as operand_fields
from fusekit.plan.operations import OPERATIONS, Operation, Schema, operation
from fusekit.plan.quant import Quant
from fusekit.plan.tiles import SWAPPED, default_mainloop
from fusekit.spec.exchange import ExchangeSpec
from fusekit.spec.extern import ExternSpec
from fusekit.spec.fields import KERNEL_FIELDS, SWEEP_FIELDS, Field
from fusekit.spec.model import Activation, KernelSpec, Problem
from fusekit.spec.permutation import PermutationSpec
from fusekit.spec.quantise import QuantiseSpec
from fusekit.spec.router import RouterSpec
from fusekit.spec.rules import broken_rules
from fusekit.spec.sweep import CANDIDATES

Spec = KernelSpec | RouterSpec | PermutationSpec | ExchangeSpec | QuantiseSpec | ExternSpec
OP_DOC = "The operation."


@cache
def schemas() -> tuple[Schema, ...]:
    """Every schema of fusekit's operations; the first is what an unknown operation is read as."""
    return tuple({schema.ops: schema for schema in map(_schema, OPERATIONS)}.values())


def schema_of(op: Any) -> Schema:
    """The schema of an operation; the first for what is none, so that its error names every operation. Raises SpecError
    for an operation of a package that cannot be imported.
    """
    return _schema(op) if operation(op) is not None else schemas()[0]


@cache
def _schema(op: str) -> Schema:
    row = operation(op)
    assert row is not None
    schema: Any = row.load("schema")
    ops = tuple(operation.name for operation in OPERATIONS.values() if operation.schema == row.schema)
    if isinstance(schema, Mapping):
        schema, ops = schema[op], ()
    return _with_op(schema, row, ops or (op,))


def _with_op(schema: Schema, row: Operation, ops: tuple[str, ...]) -> Schema:
    op = Field("op", "choice", OP_DOC, choices=tuple(dict.fromkeys((*OPERATIONS, row.name))), required=True)
    others = [field for field in schema.fields if field.name != "op"]
    return replace(schema, fields=(*others[:2], op, *others[2:]), ops=ops)


def layer_of(spec: Any) -> Any:
    """The options of the layer that the kernel `spec` is a part of; None where it is none."""
    return getattr(spec, "layer", None)


def layer_name(spec: Any) -> str:
    """`file/layer` of the layer that the kernel `spec` is a part of; empty where it is none."""
    return "" if layer_of(spec) is None else str(spec.name.rpartition(".")[0])


def _make_gemm(stem: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> KernelSpec:
    activation = Activation(**(values["activation"] or {}))
    groups = 0 if OPERATIONS[values["op"]].ragged else 1  # 0: a rule asks for it
    problem = Problem(**({"E": groups} | values["problem"])) if values["problem"] else None
    tile = choice["tile"]
    quant = Quant.of(values["quant"])
    arch = ARCHITECTURES[choice["arch"]]
    shared = quant.promoted or quant.transpose
    shared = shared or (quant.weights_alone and tile[0] not in arch.tile_rows[SWAPPED])
    mainloop = choice["mainloop"] or ("cooperative" if shared else default_mainloop(tile, arch))
    if quant.weights_alone and tile[0] == arch.mma_rows and not choice["mainloop"]:
        mainloop = SWAPPED
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
        quant=quant,
        tile=tile,
        cluster=choice["cluster"],
        mainloop=mainloop,
        schedule=choice["schedule"],
        cluster_margin=values["cluster_margin"],
        problem=problem,
        summary=values["summary"],
        operands={field.name: values[field.name] for field in operand_fields()},
    )


SCHEMA = Schema(KERNEL_FIELDS, SWEEP_FIELDS, _make_gemm, broken_rules, candidates=CANDIDATES)
