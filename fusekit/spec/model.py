"""The frozen values a spec file turns into. Names are those of the file's keys."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from fusekit.errors import SpecError
from fusekit.spec.budget import Budget, budget, default_mainloop

ARCHES = ("sm_90a",)
OPS = ("dense-gemm", "grouped-gemm", "grouped-wgrad")
DTYPES = ("bf16", "fp16")
OUT_DTYPES = (*DTYPES, "f32")
GATED_ACTIVATIONS = ("swiglu", "geglu", "reglu")
PLAIN_ACTIVATIONS = ("identity", "relu", "srelu", "silu", "gelu")
BACKWARD_ACTIVATIONS = tuple(f"d{kind}" for kind in (*PLAIN_ACTIVATIONS[1:], *GATED_ACTIVATIONS))
ACTIVATIONS = (*PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS, *BACKWARD_ACTIVATIONS)


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
        return self.kind in BACKWARD_ACTIVATIONS

    @property
    def gated(self) -> bool:
        """Whether two columns of z make one of y."""
        return self.kind.removeprefix("d") in GATED_ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape that variants are chosen for, `run` and the benchmarks use: x[M, K], w of N x K for each of E groups.

    For grouped-wgrad: dy[M, N], x[M, K], dw of N x K for each of E groups. A backward activation does not halve N.
    """

    E: int
    M: int
    N: int
    K: int


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin."""

    file: str
    kernel: str
    op: str
    arch: str
    dtype: str
    out_dtype: str
    b_major: str
    alpha: str
    bias: bool
    save_preactivation: bool
    activation: Activation
    glu_layout: str
    row_scale: bool
    accumulate: bool
    recompute: bool
    dprob: bool
    dbias: bool
    quant: str
    tile: tuple[int, int]
    cluster: tuple[int, int]
    mainloop: str
    schedule: str
    cluster_margin: int
    problem: Problem | None
    summary: str

    @property
    def name(self) -> str:
        """`file/kernel`: every variant of the kernel."""
        return f"{self.file}/{self.kernel}"

    @property
    def variant(self) -> str:
        """The sweep's choice, such as `128x192-c2x1`; a suffix where the main loop or schedule is not the usual one."""
        (tile_m, tile_n), (cluster_m, cluster_n) = self.tile, self.cluster
        suffix = ""
        if self.mainloop != default_mainloop(self.tile):
            suffix += "-coop" if self.mainloop == "cooperative" else f"-{self.mainloop}"
        if self.schedule != "static":
            suffix += f"-{self.schedule}"
        return f"{tile_m}x{tile_n}-c{cluster_m}x{cluster_n}{suffix}"

    @property
    def full_name(self) -> str:
        """`file/kernel@variant`. Kernels of several architectures share it."""
        return f"{self.name}@{self.variant}"

    @property
    def budget(self) -> Budget:
        """Stages, shared memory and registers; raises SpecError where the tile does not fit."""
        return budget(
            self.tile,
            self.cluster,
            self.mainloop,
            op=self.op,
            b_major=self.b_major,
            glu_layout=self.glu_layout,
            backward=self.activation.backward,
            recompute=self.recompute,
            dbias=self.dbias,
        )

    def canonical(self) -> dict[str, Any]:
        """The whole spec in JSON types, keys sorted."""
        return _members(self)

    @classmethod
    def from_canonical(cls, data: Mapping[str, Any]) -> "KernelSpec":
        """The spec that `canonical()` gave. Raises SpecError for other keys than this version writes."""
        expected = {field.name for field in fields(cls)}
        if set(data) != expected:
            odd = ", ".join(sorted(expected ^ set(data)))
            raise SpecError(
                f"a canonical spec has exactly the keys of this version; different: {odd}; build the kernel again"
            )
        values = dict(data)
        values["activation"] = Activation(**values["activation"])
        values["problem"] = None if values["problem"] is None else Problem(**values["problem"])
        values["tile"] = tuple(values["tile"])
        values["cluster"] = tuple(values["cluster"])
        return cls(**values)

    def device_spec(self) -> dict[str, Any]:
        """What decides the cubin and its launch record, in JSON types: no names, scalars, margin or problem."""
        budget = self.budget
        return {
            "accumulate": self.accumulate,
            "activation": {"approximate": self.activation.approximate, "kind": self.activation.kind},
            "alpha": self.alpha,
            "arch": self.arch,
            "b_major": self.b_major,
            "bias": self.bias,
            "cluster": list(self.cluster),
            "dbias": self.dbias,
            "dprob": self.dprob,
            "dtype": self.dtype,
            "epilogue_box": budget.epilogue_box,
            "glu_layout": self.glu_layout,
            "mainloop": self.mainloop,
            "op": self.op,
            "out_dtype": self.out_dtype,
            "quant": self.quant,
            "recompute": self.recompute,
            "row_scale": self.row_scale,
            "save_preactivation": self.save_preactivation,
            "schedule": self.schedule,
            "stages": budget.stages,
            "tile": list(self.tile),
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


class Canonical(Protocol):
    """Any spec."""

    def canonical(self) -> dict[str, Any]:
        """The whole spec in JSON types, keys sorted."""


def canonical_json(spec: Canonical) -> str:
    """One line of JSON, the same for equal specs on every machine."""
    return json.dumps(spec.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return _members(value) if isinstance(value, (Activation, Problem)) else value


def _members(value: KernelSpec | Activation | Problem) -> dict[str, Any]:
    # Not `asdict`: it copies deeply, which thousands of specs would feel.
    return {name: _json_value(getattr(value, name)) for name in sorted(type(value).__slots__)}
