"""A whole layer as data: the kernels that it needs, its buffers, and the launches of its passes, in order."""

from fusekit.plan.layer.options import KINDS, Options, broken, layer_fields
from fusekit.plan.layer.passes import program
from fusekit.plan.layer.program import Buffer, Program, Step

__all__ = [
    "KINDS",
    "Buffer",
    "Options",
    "Program",
    "Step",
    "broken",
    "layer_fields",
    "program",
]
