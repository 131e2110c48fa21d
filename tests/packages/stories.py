"""Packages of strangers: an operation, an activation, an operand, each as files and one entry point."""

from pathlib import Path

OPERATION = {
    "operation.py": '''
"""y = 2 x."""

from fusekit.plan.operations import Operation

DOUBLE = Operation(
    "double-it",
    schema="doubling.schema:SCHEMA",
    planner="doubling.kernels:plan",
    variants="doubling.variants:order",
    reference="doubling.reference:double",
    words="doubling.words:WORDS",
)
''',
    "schema.py": """
from dataclasses import dataclass

from fusekit.plan.fields import Field
from fusekit.plan.operations import Schema
from fusekit.spec.token import TokenProblem, TokenSpec


@dataclass(frozen=True, slots=True)
class DoubleSpec(TokenSpec):
    file: str
    kernel: str
    op: str
    arch: str
    warps: int
    problem: TokenProblem | None
    summary: str


def make(file, values, choice):
    return DoubleSpec(file, values["name"], values["op"], choice["arch"], choice["warps"] or 4, None, values["summary"])


def broken(spec):
    return [] if spec.warps < 9 else [("warps", spec.warps, "must be 8 at most")]


FIELDS = (
    Field("name", "string", "The name.", required=True),
    Field("summary", "string", "One line."),
    Field("arch", "choice", "Target architecture.", choices=("sm_90a",), required=True, sweep=True),
    Field("warps", "int", "Warps of a block.", minimum=1, sweep=True),
)
SCHEMA = Schema(FIELDS, ("arch", "warps"), make, broken)
""",
    "kernels.py": """
import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute

from fusekit.abi import Dim, TensorArgument
from fusekit.compiler.hostfunction import Signature, token_wise


class Double:
    def __init__(self, warps):
        self.threads = 32 * warps

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        count = x.shape[0]
        self.kernel(x.iterator, y.iterator, count).launch(
            grid=[(count + self.threads - 1) // self.threads, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, count: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        if index < count:
            y[index] = x[index] * cutlass.Float32(2.0)


def plan(spec):
    arguments = tuple(TensorArgument(name, role, "f32", ("T",), (1,), alignment=4)
                      for name, role in (("x", "input"), ("y", "output")))
    signature = Signature(spec.arch, arguments, (Dim("T", maximum=2**30),), skip_if_zero=("T",))
    return token_wise(Double(spec.warps), ("x", "y"), signature)
""",
    "variants.py": "def order(spec, problem):\n    return -spec['warps']\n",
    "reference.py": "def double(spec, inputs):\n    return {'y': 2.0 * inputs['x']}\n",
    "words.py": "WORDS = {'x': 'What is doubled.', 'y': 'Twice x.'}\n",
}
DOUBLE_SPEC = 'schema = 1\n[[kernel]]\nname = "k"\nop = "double-it"\narch = "sm_90a"\nwarps = [2, 4]\n'

ACTIVATION = {
    "activation.py": '''
"""z min(max(z + 3, 0), 6) / 6."""

REFERENCE = "swishing.reference"


def value(m, z):
    return z * m.minimum(m.maximum(z + m.Float32(3.0), m.Float32(0.0)), m.Float32(6.0)) * m.Float32(1.0 / 6.0)
''',
    "reference.py": """
import numpy as np


def function(z, activation):
    return z * np.clip(z + 3.0, 0.0, 6.0) / 6.0


def slope(z, activation):
    return np.where(np.abs(z) < 3.0, (2.0 * z + 3.0) / 6.0, (z > 0.0) * 1.0)
""",
}
_DENSE = """schema = 1
[[kernel]]
name = "{name}"
op = "dense-gemm"
arch = "sm_90a"
tile = [64, 64]
cluster = [1, 1]
{more}
problem = {{ E = 1, M = 100, N = 64, K = 64 }}
"""
ACTIVATION_SPEC = _DENSE.format(name="hard", more='activation = { kind = "hardswish" }')

OPERAND = {
    "plan.py": '''
"""row_shift [M]: added to every output of its row."""

from fusekit.plan.fields import Field
from fusekit.plan.operands import FORWARD, Operand
from fusekit.plan.operands.base import vector


class RowShift(Operand):
    name, order, epilogues = "row_shift", 95, (FORWARD,)
    field = Field("row_shift", "bool", "Adds row_shift[m] to row m of y.", default=False)
    words = {"row_shift": "Added to every output of a row."}
    device_module = "shifting.device"
    twin = "shifting.reference"

    def arguments(self, plan):
        return (vector("row_shift", "input", "f32", "M"),)


ROW_SHIFT = RowShift()
''',
    "device.py": """
from fusekit.kernels.gemm.operands.base import DeviceOperand, row_pair


class RowShift(DeviceOperand):
    step = 6

    def parameter(self, given):
        return given.row_shift.iterator

    def rows(self, rows, work, state, acc):
        return row_pair(work.operands.row_shift, rows)

    def output(self, value, row_state, r: int):
        return value + row_state[r]
""",
    "reference.py": """
import numpy as np

step = 6


def inputs(means, dims, rng, seed):
    return {"row_shift": rng.uniform(-1.0, 1.0, dims["M"]).astype(np.float32)}


def output(means, inputs, value, error, rows):
    shift = inputs["row_shift"][rows].astype(np.float64)[:, None]
    return value + shift, error + 2.0**-24 * np.abs(value + shift)
""",
}
OPERAND_SPEC = _DENSE.format(name="shifted", more="row_shift = true")


def install(folder: Path, package: str, group: str, point: str, files: dict[str, str]) -> Path:
    """Makes the package, with the entry point `point` ("name = module:attribute"); the folder of its code."""
    code = folder / package
    code.mkdir(parents=True)
    for name, text in {"__init__.py": "", **files}.items():
        (code / name).write_text(text)
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{point}\n")
    return code
