"""The epilogues on plain numbers: 32 lanes of NumPy take the place of a warp, and what the hooks of every operand make
of a tile's accumulators lies, element by element, where the reference has it.

Memory is emulated as PTX has it: fragments of wgmma, ldmatrix and stmatrix, and the swizzle of a tensor map's boxes.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from cutlass import cute

from fusekit.compiler.gemm import _function
from fusekit.kernels import ptx
from fusekit.kernels.gemm import maths
from fusekit.kernels.gemm.operands import dprob, row_scale, x_scale
from fusekit.kernels.gemm.operands.base import Rows
from fusekit.plan.gemm import BIG
from fusekit.reference import gemm, make_inputs
from fusekit.reference.formats import values
from fusekit.reference.fp8 import decode
from tests.plans import gemm_spec

LANES = np.arange(32)
GROUP, FIRST, END = 1, 20, 50  # a warp's 16 rows lie in a group that begins at row 10
SIZES = [10, 40, 14]
LAYOUTS = ["concat", "interleaved", "interleaved-32"]
SCALARS = {"act_alpha": 1.702, "act_limit": 0.75, "act_up_offset": 1.0}


class Registers(list):
    """A tensor in registers."""

    def fill(self, value):
        self[:] = [value] * len(self)


class Memory:
    """Elements of two bytes, or float32 where `words`, at byte addresses; a box is read back without its swizzle."""

    def __init__(self, size, unit=2):
        self.data, self.unit = np.full(size // unit, np.nan), unit

    def load(self, address, count):
        return [self.data[address // self.unit + index] for index in range(count)]

    def store(self, address, numbers):
        for index, number in enumerate(numbers):
            self.data[address // self.unit + index] = number

    def places(self, rows, stride):
        """Index of each element of a box whose rows have `stride` bytes, as a tensor map swizzles it."""
        address = np.arange(rows)[:, None] * stride + np.arange(stride // 2) * 2
        return (address ^ ((address >> 7 & (stride // 16 - 1)) << 4)) // 2


class Pointer(int):
    def toint(self):
        return int(self)


@pytest.fixture
def warp(monkeypatch):
    """What the hooks ask of the hardware, on arrays with an element for each lane; packed words are pairs."""
    memory = SimpleNamespace(shared=Memory(2**16), numbers=Memory(2**16, 4))

    def patch(holder, **names):
        for name, value in names.items():
            monkeypatch.setattr(holder, name, value)

    def matrices(address):
        for matrix in range(4):
            at = address[8 * matrix + LANES // 4] + 4 * (LANES % 4)
            yield at

    patch(cute.arch, lane_idx=lambda: LANES, shuffle_sync=lambda value, source: value[source],
          shuffle_sync_bfly=lambda value, offset: value[LANES ^ offset])  # fmt: skip
    patch(cute, make_rmem_tensor=lambda shape, dtype: Registers([np.zeros(32)] * shape[0]))
    patch(ptx, divide=lambda a, b: a // b, choose=lambda flag, a, b: np.where(flag != 0, a, b),
          pack_pair=lambda low, high, dtype: (low, high), unpack_pair=lambda packed, dtype: packed,
          worked_out=lambda *numbers: None, flag=int,
          load_shared_f32x2=lambda address: memory.numbers.load(address, 2),
          load_shared_b32x2=lambda address: [memory.shared.load(address + word * 4, 2) for word in range(2)],
          store_shared_b32x2=lambda address, *words: [
              memory.shared.store(address + word * 4, pair) for word, pair in enumerate(words)],
          load_matrix_x4=lambda address: [memory.shared.load(at, 2) for at in matrices(address)],
          store_matrix_x4=lambda address, words: [
              memory.shared.store(at, pair) for at, pair in zip(matrices(address), words, strict=True)])  # fmt: skip
    patch(maths, Float32=float, exp2_approx=np.exp2, reciprocal_approx=lambda t: 1 / t, minimum=np.minimum,
          maximum=np.maximum, where_at_most=lambda a, b, value: np.where(a <= b, value, 0.0),
          where_within=lambda a, b, value: np.where(abs(a) <= b, value, 0.0))  # fmt: skip
    patch(dprob, Float32=float)
    for module in (row_scale, x_scale):
        patch(module, row_pair=lambda numbers, rows: [numbers[rows.row + LANES // 4 + 8 * r] for r in range(2)])
    return memory


class Boxes:
    """Staging boxes: what is stored goes to a matrix right away, by its coordinates."""

    def __init__(self, half_n):
        self.half_n = half_n

    def store(self, number, columns, registers, descriptor, where, staging):
        self.put([number for pair in registers for number in pair], columns, descriptor, where)

    def store_values(self, number, columns, numbers, descriptor, where, staging, add=False):
        if isinstance(numbers[0], tuple):  # of 16 bits
            self.store(number, columns, numbers, descriptor, where, staging)
        else:
            self.put(numbers, columns, descriptor, where)

    def put(self, numbers, columns, result, where):
        first, end = where[0] + (where[2] * self.half_n if len(where) == 5 else 0), where[-1]
        assert where[-2] == BIG
        assert len(numbers) == columns // 2
        for index, number in enumerate(numbers):
            chunk, r, c = index // 4, index // 2 % 2, index % 2
            result[end - (BIG - where[1]) + LANES // 4 + 8 * r, first + chunk * 8 + 2 * (LANES % 4) + c] = number


def kernel(spec):
    """A kernel's epilogue and the device halves of its operands."""
    gemm_kernel = _function(spec.plan)
    return gemm_kernel.epilogue, gemm_kernel.halves


def blocks_of(result):
    """What takes the place of `Fp8Output.block`: what would be quantised goes to a matrix."""

    def block(words, box, extent, rows, target, first, four=False, whole=False):
        column, width = extent
        each = 4 if four else 2  # words of a chunk
        for number, pair in enumerate(words):
            r, c = (number // 2 % 2, number % 2) if four else (number % 2, 0)
            at = column + number // each * (4 * each) + (LANES % 4) * each + 2 * c
            for index, value in enumerate(pair):
                there = at + index < width
                result[(rows.row + LANES // 4 + 8 * r)[there], (at + index)[there]] = value[there]

    return block


def columns_of(plan, w, n_tile, n):
    """Column of the product in memory of each column of a tile, as the boxes of w are loaded."""
    nowhere = SimpleNamespace(w=0, full=0)
    boxes = w.boxes(0, nowhere, 0, 0, (n_tile, n // 2, GROUP))
    return np.concatenate([start + np.arange(plan.tile[1] // len(boxes.starts)) for start in boxes.starts])


def accumulators(plan, products, columns):
    """A warp's fragments of rows FIRST.. of a tile: number (chunk, r, c) of each lane."""
    result = []
    for number in range(plan.tile[1] // 2):
        chunk, r, c = number // 4, number // 2 % 2, number % 2
        column = columns[chunk * 8 + 2 * (LANES % 4) + c]
        there = column < products.shape[1]
        row = FIRST + LANES // 4 + 8 * r
        result.append(np.where(there, products[row, np.where(there, column, 0)], 0.0))
    return result


def plain_product(spec, given):
    """x . w of all rows, in float64, without what operands make of it."""
    pairs = [(given[name], kind) for name, kind in zip("xw", spec.plan.factors, strict=True)]
    x, w = (
        (decode if spec.plan.quant.coded_inputs else values)(array, kind).astype(np.float64) for array, kind in pairs
    )
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    w = w if spec.b_major == "k" else w.swapaxes(1, 2)
    return np.einsum("mk,mnk->mn", x, w[owner])


def run_forward(warp, spec, n):
    """y and z of 16 rows, as the epilogue stores them; inputs."""
    plan = spec.plan
    given = make_inputs(spec, E=len(SIZES), M=sum(SIZES), N=n, K=64, sizes=SIZES)
    epilogue, halves = kernel(spec)
    products, width = plain_product(spec, given), n // 2 if plan.halved else n
    actual = {"y": np.full((sum(SIZES), width + 256), np.nan), "preactivation": np.full((sum(SIZES), n + 256), np.nan)}
    actual["fp8"] = np.full((sum(SIZES), width + 256), np.nan)
    operands = SimpleNamespace(**actual, row_scale=given.get("row_scale"), alpha=given.get("alpha"), y_fp8=None,
                               x_scale=given.get("x_s"), w_scale=given.get("w_s"),
                               activation=tuple(SCALARS.values()))  # fmt: skip
    if "y_fp8" in halves:
        halves["y_fp8"].block = blocks_of(actual["fp8"])
    tables = {"bias": "bias", "w_scale": "w_s"}
    for n_tile in range(-(-n // plan.tile[1])):
        columns = columns_of(plan, halves["w"], n_tile, n)
        work = SimpleNamespace(operands=operands, extents=SimpleNamespace(n=n, half_n=n // 2), staging=0)
        states = {}
        for number, (name, half) in enumerate(halves.items()):
            if name in tables and getattr(half, "by_column", True):
                table = given[tables[name]][GROUP]
                table = values(table, spec.dtype) if table.dtype == np.uint16 else table
                wanted = [half.column_of(column, n_tile, n // 2) for column in range(plan.tile[1])]
                warp.numbers.store(number * 4096, [table[item] if item < n else 0.0 for item in wanted])
                states[name] = SimpleNamespace(iterator=Pointer(number * 4096))
            else:
                states[name] = half.start(SimpleNamespace(group=GROUP), work, None)
        epilogue.boxes = Boxes(n // 2)
        acc = accumulators(plan, products, columns)
        rows = Rows(FIRST, END, n_tile, 0)
        epilogue.finish_rows(acc, 0, rows, work, epilogue.operands.scalars(operands), SimpleNamespace(**states))
    return actual, given


FORWARD = [
    {"glu_layout": layout, "b_major": major, "tile": tile, "bias": True, "alpha": alpha, "row_scale": True}
    for layout in LAYOUTS
    for major, tile, alpha in (("k", (128, 128), "group"), ("n", (128, 128), "scalar"), ("k", (128, 64), "none"))
    if (major, layout) != ("n", "concat") or tile[1] % 128 == 0
] + [
    {"kind": "silu", "tile": (128, 160), "bias": True, "alpha": "group", "row_scale": True},
    {"kind": "identity", "tile": (128, 128), "b_major": "n", "row_scale": True},
    *({"glu_layout": layout, "tile": (128, 128), "quant": "in=fp8-row accumulation=fast", "bias": True}
      for layout in ("none", *LAYOUTS)),
    {"kind": "silu", "tile": (128, 128), "quant": "in=fp8-tensor accumulation=fast"},
    *({"glu_layout": layout, "tile": (128, 256), "quant": "out=fp8-block keep=true", "out_dtype": "bf16"}
      for layout in ("none", "concat", "interleaved-32")),
]  # fmt: skip


@pytest.mark.parametrize("keys", FORWARD, ids=lambda keys: "-".join(map(str, keys.values())))
def test_a_forward_epilogue_is_the_reference(warp, keys):
    kind = keys.get("kind") or ("swiglu" if keys.get("glu_layout", "none") != "none" else "silu")
    saved = "quant" not in keys
    spec = gemm_spec(**{"out_dtype": "f32", "save_preactivation": saved, **keys, "kind": kind})
    n = 2 * spec.tile[1] + (64 if spec.glu_layout == "interleaved-32" else 32)  # a last tile that is not full
    result, given = run_forward(warp, spec, n)
    rows, coded = slice(FIRST, FIRST + 16), {"y": "fp8"} if spec.plan.quant.coded else {}
    for name, expected in gemm(spec, given | (SCALARS if spec.activation.gated else {})).items():
        for item in {name, coded.get(name, name)}:
            actual = result[item][rows, : expected.shape[1]]
            np.testing.assert_allclose(actual, expected[rows], rtol=1e-5, atol=1e-5, err_msg=item)


def run_backward(warp, spec, n):
    """dz, y and dprob of 16 rows, as the epilogue makes them; inputs."""
    plan, memory = spec.plan, warp.shared
    given = make_inputs(spec, E=len(SIZES), M=sum(SIZES), N=n, K=64, sizes=SIZES)
    epilogue, halves = kernel(spec)
    products, sides = plain_product(spec, given), plan.sides
    z = values(given["preactivation"], spec.dtype).astype(np.float64)
    result = {"dz": np.full((sum(SIZES), sides * n + 512), np.nan), "y": np.full((sum(SIZES), n + 256), np.nan)}
    result["fp8"] = np.full_like(result["dz"], np.nan)
    operands = SimpleNamespace(row_scale=given["row_scale"], activation=tuple(SCALARS.values()), dz_fp8=None)
    work = SimpleNamespace(operands=operands, extents=SimpleNamespace(rows=None, n=n), staging=0)
    sums, width = np.zeros(16), plan.z_columns
    padded = np.pad(z.reshape(len(z), -1), ((0, 0), (0, 512)))
    for n_tile in range(-(-n // plan.tile[1])):
        acc = accumulators(plan, products, columns_of(plan, halves["w"], n_tile, n))
        rows = Rows(FIRST, END, n_tile, 0)
        row_state = epilogue.operands.rows(rows, work, epilogue.operands.gather_states(lambda name, half: None), None)
        gradients = []
        for unit in range(epilogue.units):
            where = epilogue.place(SimpleNamespace(row=FIRST, end=END, n_tile=n_tile), 0, 0, unit)
            assert where[-1] - (BIG - where[1]) == FIRST
            firsts = [where[0] + side * n for side in range(2)] if plan.glu_layout == "concat" else [where[0]]
            places = memory.places(16, 2 * width)
            for part, first in enumerate(firsts):
                memory.data[places + part * 16 * width] = padded[FIRST : FIRST + 16, first : first + width]
            scalars = epilogue.operands.scalars(operands)
            packed = epilogue.work(acc, unit * (epilogue.columns // 2), 0, LANES, scalars, row_state, steps := [])
            gradients.append(steps)
            for part, first in enumerate(firsts):
                end = min(first + width, n * (part + 1)) if plan.glu_layout == "concat" else first + width
                result["dz"][FIRST : FIRST + 16, first:end] = memory.data[places + part * 16 * width][:, : end - first]
            for index, pair in enumerate(packed):
                column = n_tile * plan.tile[1] + unit * epilogue.columns + index // 2 * 8 + 2 * (LANES % 4)
                for c in range(2):
                    result["y"][FIRST + LANES // 4 + 8 * (index % 2), column + c] = pair[c]
        if "dz_fp8" in halves:
            halves["dz_fp8"].block = blocks_of(result["fp8"])
            halves["dz_fp8"].gradients((gradients, []), rows, work)
        for r in range(2):
            np.add.at(sums, LANES // 4 + 8 * r, row_state.dprob.sums[r])
    return result | {"dprob": sums}, given


BACKWARD = (
    [
        {"glu_layout": layout, "b_major": major, "tile": (128, tile_n)}
        for layout in LAYOUTS
        for major, tile_n in (("k", 96), ("n", 128))
    ]
    + [{"kind": kind, "tile": (128, tile_n)} for kind, tile_n in (("dsilu", 128), ("dgelu", 160), ("dsrelu", 48))]
    + [{"glu_layout": layout, "tile": (128, 128), "quant": "out=fp8-block keep=true"} for layout in ("none", *LAYOUTS)]
)


@pytest.mark.parametrize("keys", BACKWARD, ids=lambda keys: "-".join(map(str, keys.values())))
def test_a_backward_epilogue_is_the_reference(warp, keys):
    spec = gemm_spec(**keys, backward=True, row_scale=True, recompute=True, dprob=True)
    n = 2 * spec.tile[1] + (128 if spec.plan.quant.coded else 32)
    result, given = run_backward(warp, spec, n)
    rows, coded = slice(FIRST, FIRST + 16), {"dz": "fp8"} if spec.plan.quant.coded else {}
    for name, expected in gemm(spec, given | (SCALARS if spec.activation.gated else {})).items():
        for item in {name, coded.get(name, name)}:
            actual = result[item] if item == "dprob" else result[item][rows, : expected.shape[1]]
            np.testing.assert_allclose(actual, expected[rows], rtol=1e-5, atol=1e-5, err_msg=item)
