"""A mixture-of-experts MLP of any size: which problem each of its kernels has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.errors import UsageError
from fusekit.plan.operations import OPERATIONS

# Kernels of a model file by what they are called -> what their N and K are: H the hidden size, I the intermediate one,
# W the columns of z: 2 I where the activation is gated.
ROLES = {
    "fc1-fwd": ("W", "H"),
    "fc1-infer": ("W", "H"),
    "fc2-fwd": ("H", "I"),
    "fc2-dgrad": ("I", "H"),
    "fc1-dgrad": ("H", "W"),
    "fc1-wgrad": ("W", "H"),
    "fc2-wgrad": ("H", "I"),
}
# What a training step launches, in its order.
STEPS = {
    "forward": ("fc1-fwd", "fc2-fwd"),
    "backward": ("fc2-dgrad", "fc2-wgrad", "fc1-dgrad", "fc1-wgrad"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from the user; None: the spec's. E groups (local experts), H hidden size, I intermediate size, M rows;
    T tokens, which decide the rows of a layer's kernels.
    """

    E: int | None = None
    H: int | None = None
    I: int | None = None  # noqa: E741 - the field's own name
    M: int | None = None
    T: int | None = None

    def problem(self, spec: Mapping[str, Any], gated: bool) -> dict[str, int]:
        """E, M, N and K for the kernel of `spec` (canonical form). gated: whether its model's activation is.

        Raises UsageError where a size is asked for that this kernel's name does not tell the meaning of, or is missing.
        """
        problem: dict[str, int] = dict(spec.get("problem") or {})
        name, role = spec["kernel"], ROLES.get(spec["kernel"])
        if role is None and (self.H is not None or self.I is not None):
            raise UsageError(
                f"{name} takes no hidden or intermediate size; those of {', '.join(ROLES)} are known; leave them out,"
                " or give the kernel's problem in its spec"
            )
        dims = {
            **problem,
            **({"E": self.E} if self.E is not None else {}),
            **({"M": self.M} if self.M is not None else {}),
        }
        if not OPERATIONS[spec["op"]].ragged:
            dims["E"] = 1
        if self.T is not None:
            dims["M"] = self.T * (spec["layer"]["topk"] if OPERATIONS[spec["op"]].ragged else 1)
        for dim, meaning in zip(("N", "K"), role or (), strict=False):
            size = self.I if meaning in ("I", "W") else self.H
            if size is not None:
                dims[dim] = 2 * size if meaning == "W" and gated else size
        missing = [dim for dim in ("E", "M", "N", "K") if dim not in dims]
        if missing:
            raise UsageError(
                f"{name}: no {', '.join(missing)}; its spec names no problem, so all sizes must be given: -E, --hidden,"
                " --intermediate, --rows"
            )
        return {dim: dims[dim] for dim in ("E", "M", "N", "K")}


def is_gated(specs: list[Mapping[str, Any]]) -> bool:
    """Whether the model that these kernels belong to has gate and up: what its activations say; gated if none does."""
    kinds = [spec["activation"]["kind"] for spec in specs if spec["kernel"] in ("fc1-fwd", "fc1-infer", "fc2-dgrad")]
    layouts = [spec["glu_layout"] for spec in specs if spec["activation"]["kind"] in kinds]
    return any(layout != "none" for layout in layouts) if kinds else True
