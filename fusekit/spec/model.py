"""The frozen values a spec file turns into. Names are those of the file's fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from fusekit.plan.activations import kind as kind_of
from fusekit.plan.arch import ARCHES, ARCHITECTURES
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD, outside
from fusekit.plan.operands import fields as operand_fields
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import Quant
from fusekit.plan.tiles import default_mainloop

__all__ = ["ARCHES", "DTYPES", "OPS", "OUT_DTYPES", "Activation", "KernelSpec", "Problem", "names"]

OPS = tuple(row.name for row in OPERATIONS.values() if row.gemm)
DTYPES = ("bf16", "fp16")
OUT_DTYPES = (*DTYPES, "f32")


@dataclass(frozen=True, slots=True)
class Activation:
    """The epilogue's activation.

    Plain kinds act on z: identity, relu, srelu = max(z, 0)^2, silu, gelu. Gated kinds take z = (g, u), clamped to g
    <= limit, |u| <= limit, to: swiglu g.sigmoid(alpha.g).(u + up_offset), geglu gelu(g).(u + up_offset), reglu max(g,
    0).(u + up_offset). alpha, limit (None: no clamp) and up_offset are run-time scalars with these defaults, not part
    of the cubin.

    "d" before any kind but identity is its derivative: with da the accumulator and z what the forward pass saved, dz =
    da . d/dz, in the layout of z; zero for a clamped element.
    """

    kind: str = "identity"
    approximate: str = "none"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    @property
    def backward(self) -> bool:
        """Whether it is the derivative of an activation."""
        return kind_of(self.kind).backward

    @property
    def gated(self) -> bool:
        """Whether two columns of z make one of y."""
        return kind_of(self.kind).gated

    @property
    def function(self) -> str:
        """The kind of the forward activation."""
        return kind_of(self.kind).function


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape that variants are chosen for, `run` and the benchmarks use: x[M, K], w of N x K for each of E groups.

    For a weight gradient: dy[M, N], x[M, K], dw of N x K for each of E groups. A backward activation does not halve N.
    """

    E: int
    M: int
    N: int
    K: int


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin.

    operands: the value of each operand's field, by name. layer: the options of the layer that it is a part of.
    """

    file: str
    kernel: str
    op: str
    arch: str
    dtype: str
    out_dtype: str
    b_major: str
    activation: Activation
    glu_layout: str
    quant: Quant
    tile: tuple[int, int]
    cluster: tuple[int, int]
    mainloop: str
    schedule: str
    cluster_margin: int
    problem: Problem | None
    summary: str
    operands: Mapping[str, Any] = field(hash=False)
    layer: Any = None

    @property
    def name(self) -> str:
        """`file/kernel`: every variant of the kernel."""
        return f"{self.file}/{self.kernel}"

    @property
    def variant(self) -> str:
        """The sweep's choice, such as `128x192-c2x1`; a suffix where the main loop or schedule is not the usual one."""
        (tile_m, tile_n), (cluster_m, cluster_n) = self.tile, self.cluster
        suffix = ""
        if self.mainloop != default_mainloop(self.tile, ARCHITECTURES[self.arch]):
            suffix += "-coop" if self.mainloop == "cooperative" else f"-{self.mainloop}"
        if self.schedule != "static":
            suffix += f"-{self.schedule}"
        return f"{tile_m}x{tile_n}-c{cluster_m}x{cluster_n}{suffix}"

    @property
    def full_name(self) -> str:
        """`file/kernel@variant`. Kernels of several architectures share it."""
        return f"{self.name}@{self.variant}"

    @property
    def epilogue(self) -> str:
        """The kind of epilogue: "forward", "backward" or "wgrad"."""
        if OPERATIONS[self.op].reduces_rows:
            return WGRAD
        return BACKWARD if self.activation.backward else FORWARD

    @property
    def grouped(self) -> bool:
        """Whether its rows belong to groups."""
        return bool(OPERATIONS[self.op].ragged)

    @cached_property
    def plan(self) -> GemmPlan:
        """Stages, shared memory, registers, arguments."""
        return GemmPlan(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names(KernelSpec)}

    def canonical(self) -> dict[str, Any]:
        """The whole spec in JSON types, sorted; `layer` only of a layer's kernel, and a field of another package's
        operand only where it is not the default.
        """
        values = _members(self)
        operands = values.pop("operands")
        if self.layer is None:
            del values["layer"]
        else:
            values["layer"] = {"name": f"{self.layer.file}/{self.layer.name}", "topk": self.layer.topk}
        usual = {field.name: field.default for field in operand_fields() if field.name in outside()}
        values |= {name: value for name, value in operands.items() if name not in usual or value != usual[name]}
        return dict(sorted(values.items()))

    def device_spec(self) -> dict[str, Any]:
        """The fields that decide the cubin and its launch record, in JSON types: no names, scalars, cluster_margin or
        problem, and no field of an operand that the kernel does not have.
        """
        return {
            "activation": {"approximate": self.activation.approximate, "kind": self.activation.kind},
            "arch": self.arch,
            "b_major": self.b_major,
            "cluster": list(self.cluster),
            "dtype": self.dtype,
            "epilogue": self.epilogue,
            "epilogue_box": self.plan.epilogue_box,
            "glu_layout": self.glu_layout,
            "grouped": self.grouped,
            "mainloop": self.mainloop,
            "op": self.op,
            "out_dtype": self.out_dtype,
            "quant": self.quant.canonical(),
            "schedule": self.schedule,
            "stages": self.plan.stages,
            "tile": list(self.tile),
            **{
                field.name: self.operands[field.name]
                for field in operand_fields()
                if self.operands[field.name] != field.default
            },
        }

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out: act_alpha, act_limit (inf: no clamp), act_up_offset, cluster_margin."""
        scalars: dict[str, float | int] = {"cluster_margin": self.cluster_margin}
        if self.activation.gated:
            limit = self.activation.limit
            scalars["act_alpha"] = self.activation.alpha
            scalars["act_limit"] = math.inf if limit is None else limit
            scalars["act_up_offset"] = self.activation.up_offset
        return scalars


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "canonical"):
        return value.canonical()
    return _members(value) if isinstance(value, (Activation, Problem)) else value


def _members(value: Any) -> dict[str, Any]:
    # Not `asdict`: it copies deeply, which thousands of specs would feel.
    kind: Any = type(value)
    return {name: _json_value(getattr(value, name)) for name in names(kind)}


@cache
def names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass, sorted."""
    return tuple(sorted(field.name for field in fields(kind)))
