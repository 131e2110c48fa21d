"""The definition of each operation, in NumPy and float64.

Runs anywhere NumPy does; a GPU's result is compared with it by ``check``. 16-bit tensors are uint16 bit patterns.
"""

from fusekit.reference.formats import POISON, decode, encode, held, poisoned
from fusekit.reference.fp8_output import coded_outputs
from fusekit.reference.gemm import check, coded_check, expected, gemm, order_check, row_ends
from fusekit.reference.inputs import BY_GROUP, group_sizes, make_inputs, offsets_of, output_shapes
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.reference.permutation import permutation_check, permutation_inputs
from fusekit.reference.quantise import quantise, quantise_check, quantise_inputs, quantise_output_shapes
from fusekit.reference.router import route
from fusekit.reference.router_check import router_check, router_inputs
from fusekit.reference.sampling import sample_rows, sample_weights
from fusekit.reference.tokens import token_output_shapes

__all__ = [
    "BY_GROUP",
    "POISON",
    "Expected",
    "Measurement",
    "check",
    "coded_check",
    "coded_outputs",
    "decode",
    "encode",
    "expected",
    "gemm",
    "group_sizes",
    "held",
    "make_inputs",
    "measure",
    "offsets_of",
    "order_check",
    "output_shapes",
    "permutation_check",
    "permutation_inputs",
    "poisoned",
    "quantise",
    "quantise_check",
    "quantise_inputs",
    "quantise_output_shapes",
    "route",
    "router_check",
    "router_inputs",
    "row_ends",
    "sample_rows",
    "sample_weights",
    "token_output_shapes",
]
