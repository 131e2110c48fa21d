"""The order of tiles: every one worked on once, cluster by cluster, on plain integers in the place of registers."""

import importlib.util
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.kernels import ptx
from fusekit.kernels.gemm.sm90 import raster
from fusekit.kernels.gemm.sm90.raster import ALONG_M
from tests.plans import gemm_plan


def uncompiled():
    """Raster as it is written. The DSL rewrites the code of a jitted function in place when it first compiles it,
    which other tests of this process may have made it do: hence a module of its own.
    """
    spec = importlib.util.spec_from_file_location("raster_uncompiled", raster.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("place_across", "place_along"):
        setattr(module.Raster, name, getattr(module.Raster, name).__wrapped__)
    return module.Raster


Raster = uncompiled()


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    monkeypatch.setattr(ptx, "divide", lambda a, b: a // b)
    monkeypatch.setattr(ptx, "modulo", lambda a, b: a % b)
    monkeypatch.setattr(ptx, "minimum_of", min)
    monkeypatch.setattr(ptx, "maximum_of", max)


CLUSTERS = [(1, 1), (2, 1), (1, 2)]
SETTINGS = {
    "tile": st.sampled_from([(64, 128), (128, 128), (128, 160), (128, 192), (256, 192)]),
    "cluster": st.sampled_from(CLUSTERS),
    "m_tiles": st.integers(1, 70),
    "n": st.integers(1, 5000),
    "depth": st.sampled_from([8, 768, 7168, 28672, 2**20]),
    "more": st.sampled_from([{}, {"glu_layout": "concat"}, {"op": "grouped-wgrad"}]),
}


def placed(order, m_tiles, n, depth):
    """(cluster tile, rank) -> (tile along M, tile along N, whether the cluster pairs rows)."""
    ranks = range(order.plan.cluster_size)
    result = {}
    for local, rank in itertools.product(range(order.count(m_tiles, n)), ranks):
        m_tile, word = order.place(local, m_tiles, n, depth, rank)
        result[local, rank] = (m_tile, word & (ALONG_M - 1), word >= ALONG_M)
    return result


@settings(max_examples=400, deadline=None)
@given(**SETTINGS)
def test_every_tile_is_worked_on_once(tile, cluster, m_tiles, n, depth, more):
    order = Raster(gemm_plan(tile=tile, cluster=cluster, **more))
    result = [(m, column) for m, column, _ in placed(order, m_tiles, n, depth).values()]
    columns = -(-n // tile[1])
    worked = [item for item in result if item[0] < m_tiles]
    assert sorted(worked) == list(itertools.product(range(m_tiles), range(columns)))
    # Only an odd number of tiles leaves a CTA idle, and then it stands after the last row.
    idle = [item for item in result if item[0] >= m_tiles]
    assert all(m == m_tiles for m, _ in idle)
    assert len(idle) <= m_tiles % 2 * columns % 2


@settings(max_examples=200, deadline=None)
@given(**SETTINGS)
def test_the_tiles_of_a_cluster_share_an_operand(tile, cluster, m_tiles, n, depth, more):
    order = Raster(gemm_plan(tile=tile, cluster=cluster, **more))
    result = placed(order, m_tiles, n, depth)
    if cluster == (1, 1):
        assert not any(along for _, _, along in result.values())
        return
    for local in range(len(result) // 2):
        (m, column, along), (other_m, other_column, other_along) = result[local, 0], result[local, 1]
        assert along == other_along
        assert (other_m - m, other_column - column) == ((1, 0) if along else (0, 1))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_cta_is_idle_where_tiles_come_out_even(cluster):
    """15 columns, as 2880 has of 192, cannot be paired; 22 row tiles can, and the other way round."""
    order = Raster(gemm_plan(tile=(128, 192), cluster=cluster))
    for m_tiles, n in ((22, 2880), (22, 5760), (23, 5760)):
        columns = n // 192
        if m_tiles % 2 == 0 or (cluster == (1, 2) and columns % 2 == 0) or cluster == (1, 1) or columns % 2 == 0:
            assert order.count(m_tiles, n) * order.plan.cluster_size == m_tiles * columns
    assert order.count(23, 2880) * order.plan.cluster_size in (23 * 15, 23 * 15 + 1)


def test_a_panel_of_rows_stays_in_the_cache():
    """Tiles that follow each other read at most a panel of x, however many rows a group has."""
    order, depth = Raster(gemm_plan(tile=(128, 192), cluster=(1, 2))), 2880
    result = placed(order, 200, 5760, depth)
    most = raster.PANEL_BYTES // 2 // depth // 128
    panels = []
    for local in range(len(result) // 2):
        panel = result[local, 0][0] // most
        if not panels or panels[-1] != panel:
            panels.append(panel)
    assert len(set(panels)) <= -(-200 // most) + 1
    rows = [result[local, 0][0] for local in range(len(result) // 2)]
    height = max(rows[: rows.index(0, 1)]) + 1
    assert height <= most
    assert all(row < height for row in rows[: height * 15])
