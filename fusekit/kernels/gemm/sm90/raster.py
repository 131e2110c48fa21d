"""In which order a group's tiles are numbered, and which two tiles a cluster works on together.

A group has `m_tiles` tiles along M and ceil(N / tile_n) columns of them. They go through panels of rows, M first inside
a panel, so that a panel's operand rows stay in L2 while N advances. A group is cut into the fewest panels of at most
`PANEL_BYTES` of x, about equally high, all but the last of an even number of tiles.

A cluster of two works on a pair: two columns of the same rows, which share x (cluster (1,2)), or two rows of the same
columns, which share w (cluster (2,1)). What does not come out even is paired the other way, so that no tile lies beyond
N and at most one CTA goes idle in a corner:

    (1,2)  the last of an odd number of columns: its rows in pairs, after the other pairs of each panel
    (2,1)  the last row tile of a group that has an odd number: its columns in pairs
"""

from cutlass import cute

from fusekit.kernels import ptx
from fusekit.plan.gemm import GemmPlan

PANEL_BYTES = 24 * 2**20  # about half of the L2 of an H100
ALONG_M = 2**30  # added to a tile's column where its cluster pairs rows


class Raster:
    """The numbering of one configuration; all tiles are of one CTA."""

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self.tile_m, self.tile_n = plan.tile
        self.elements = PANEL_BYTES // plan.element  # of x, in a panel
        self.pair = plan.cluster_size > 1
        self.step = 2 if self.pair else 1  # panels are as high as a multiple of it
        self.across = plan.cluster[1] > 1

    def columns(self, n):
        """Tiles along N."""
        return ptx.divide(n + (self.tile_n - 1), self.tile_n)

    def pairs(self, n):
        """Pairs of columns side by side; a last odd one is paired along M."""
        return ptx.divide(self.columns(n), 2)

    def count(self, m_tiles, n):
        """Cluster tiles of a group, or of a panel of `m_tiles` row tiles."""
        return ptx.divide(m_tiles * self.columns(n) + (self.step - 1), self.step)

    def place(self, local, m_tiles, n, depth, rank):
        """Tile along M and N of CTA `rank` in a group's cluster tile number `local`; the second with ALONG_M, maybe.

        depth: elements of x in a row. A tile at or beyond `m_tiles` has no rows: that CTA only helps to load.
        """
        most = ptx.maximum_of(ptx.divide(self.elements // (self.step * self.tile_m), depth), 1)
        steps = ptx.divide(m_tiles + (self.step - 1), self.step)
        panels = ptx.divide(steps + most - 1, most)
        height = ptx.divide(steps + panels - 1, panels) * self.step
        panel = ptx.divide(local, self.count(height, n))
        inside = local - panel * self.count(height, n)
        first = panel * height
        height = ptx.minimum_of(m_tiles - first, height)
        if not self.pair:
            column = ptx.divide(inside, height)
            return first + inside - column * height, column
        m_tile, column = (self.place_across if self.across else self.place_along)(inside, height, n, rank)
        return first + m_tile, column

    @cute.jit
    def place_across(self, inside, height, n, rank):
        """In a panel of a cluster (1,2)."""
        m_tile = inside
        column = self.pairs(n)
        if inside < height * column:
            column = ptx.divide(inside, height)
            m_tile = inside - column * height
            column = 2 * column + rank
        else:
            m_tile = 2 * (inside - height * column) + rank
            column = 2 * column + ALONG_M
        return m_tile, column

    @cute.jit
    def place_along(self, inside, height, n, rank):
        """In a panel of a cluster (2,1)."""
        m_tile = inside
        column = self.columns(n)
        half = ptx.divide(height, 2)
        if inside < half * column:
            column = ptx.divide(inside, half)
            m_tile = 2 * (inside - column * half) + rank
            column = column + ALONG_M
        else:  # the last of an odd number of row tiles
            inside = 2 * (inside - half * column)
            m_tile = height - 1
            if inside + 1 < column:
                column = inside + rank
            else:
                column = inside + ALONG_M
                m_tile = m_tile + rank
        return m_tile, column
