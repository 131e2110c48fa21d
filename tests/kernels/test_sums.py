"""The sums of gradients as a warp makes them, with 32 lanes of NumPy in the place of a warp's registers.

What can be tried without a GPU: which lane ends with which column, that no row or column is lost or counted twice, and
that the parts have places of their own within the scratch that the launch record asks for, where the second launch
looks for them.
"""

import itertools

import numpy as np
import pytest
from cutlass import cute
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.abi import evaluate
from fusekit.compiler.gemm import signature
from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.dbias import Dbias, Shares
from fusekit.kernels.gemm.sm90 import kit
from fusekit.spec import parse_text
from tests.plans import gemm_plan

LANES = np.arange(32)


@pytest.fixture
def warp(monkeypatch):
    """Instructions that the sums use, on arrays with an element for each lane."""
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", lambda value, offset: value[LANES ^ offset])
    monkeypatch.setattr(ptx, "choose", lambda flag, a, b: np.where(flag != 0, a, b))
    monkeypatch.setattr(ptx, "divide", lambda a, b: a // b)


def dbias(tile=(128, 192), cluster=(1, 1), layout="interleaved"):
    """The device half of dbias."""
    plan = gemm_plan(
        tile=tile, cluster=cluster, glu_layout=layout, backward=True, row_scale=True, dprob=True, dbias=True
    )
    (operand,) = (operand for operand in plan.operands if operand.name == "dbias")
    return Dbias(plan, operand, kit)


@pytest.mark.parametrize(
    ("layout", "tile_n", "unit"),
    [*itertools.product(["interleaved", "interleaved-32", "concat"], [128, 192], [32]),
     ("none", 128, 64), ("none", 160, 32), ("none", 176, 16)],
)  # fmt: skip
def test_every_column_is_summed_over_the_warps_rows(warp, layout, tile_n, unit):
    sums = dbias((128, tile_n), layout=layout)
    assert sums.columns_of_unit == unit
    sides = 1 if layout == "none" else 2
    rng = np.random.default_rng(0)
    gradients = rng.integers(-1000, 1000, (16, tile_n, sides)).astype(float)  # of (row, column of da, side)
    kept = {}
    for number in range(tile_n // unit):
        shares = Shares(LANES, None)
        for chunk in range(unit // 8):  # as the epilogue does: two rows and two columns of a chunk of eight a lane
            column = number * unit + chunk * 8 + 2 * (LANES % 4)
            rows = [
                [gradients[LANES // 4 + 8 * r, column + c, side] for c in range(2) for side in range(sides)]
                for r in range(2)
            ]
            shares.take(*rows)
        columns = shares.unit_ends()
        assert len(columns) == sums.kept
        for index, value in enumerate(columns):
            for where, item in zip(sums.column(number, index, LANES), value, strict=True):
                assert kept.setdefault(where, item) == item  # several lanes may end with one column
    expected = gradients.sum(axis=0)  # (column of da, side), which the layout brings into the order of dz
    if layout == "interleaved-32":
        expected = expected.reshape(-1, 32, 2).swapaxes(1, 2)
    elif layout == "concat":
        expected = expected.T
    assert [kept[where] for where in range(sums.tile_columns)] == expected.ravel().tolist()


@pytest.mark.parametrize("layout", ["interleaved", "interleaved-32", "concat", "none"])
@pytest.mark.parametrize("n", [2880, 2888, 64])
def test_every_column_of_dbias_has_one_place(layout, n, monkeypatch):
    monkeypatch.setattr(ptx, "divide", lambda a, b: a // b)
    sums = dbias(layout=layout, cluster=(1, 2))
    seen = [
        where
        for tile in range(-(-n // 192))
        for where, there in (sums.place(column, tile, n) for column in range(sums.tile_columns))
        if there
    ]
    assert sorted(seen) == list(range(n * sums.sides))


SPEC = """
schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "k"
op = "grouped-gemm"
activation = {{ kind = "dswiglu" }}
glu_layout = "interleaved"
row_scale = true
dprob = {dprob}
dbias = {dbias}
tile = [{tile}, 128]
cluster = [{cluster}]
"""


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129, 300, 3000]), min_size=1, max_size=9),
    spare=st.integers(0, 40),
    n=st.integers(1, 40).map(lambda units: 8 * units),
    tile=st.sampled_from([128, 256]),
    cluster=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    wanted=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_parts_have_places_of_their_own(sizes, spare, n, tile, cluster, wanted):
    """Walks over all that the warps of a launch write, and what the second launch reads, as the kernels number it."""
    dprob, sums = wanted
    text = SPEC.format(
        tile=tile, cluster=", ".join(map(str, cluster)), dprob=str(dprob).lower(), dbias=str(sums).lower()
    )
    (spec,) = parse_text(text, "t", "t.toml")
    interface = signature(spec)
    rows, groups, columns = sum(sizes) + spare, len(sizes), 2 * n
    words = evaluate(interface.scratch, {"M": rows, "E": groups, "I": n}) // 4
    tiles_n, room = -(-n // 128), -(-rows // 4) * 4
    piece = 128  # both main loops: a warpgroup's rows
    column_parts = tiles_n * room if dprob else 0
    assert column_parts % 4 == 0  # 16 bytes
    written = set()

    def write(word):
        assert word not in written
        assert 0 <= word < words
        written.add(word)

    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        for row, n_tile in itertools.product(range(begin, end, piece), range(tiles_n)):
            if dprob:
                for row_ in range(row, min(row + piece, end)):
                    write(n_tile * room + row_)
            if sums:
                start = column_parts + (row // piece + group) * columns
                for column in range(n_tile * 256, min(n_tile * 256 + 256, columns)):
                    write(start + column)
        for number in range(-(-(end - begin) // piece) if sums else 0):  # the second launch: pieces of a group
            first = column_parts + (begin // piece + group + number) * columns
            assert set(range(first, first + columns)) <= written
