"""Occupancy, as cuda_occupancy.h of CUDA 12.9 computes it for the same launches."""

import pytest

from fusekit.plan.arch import ARCHES, FOREIGN
from fusekit.plan.occupancy import occupancy


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "ctas", "limits"),
    [
        ("sm_80", 360, 152, 106579, 1, {"registers", "shared memory"}),
        ("sm_80", 125, 82, 0, 5, {"registers"}),
        ("sm_80", 937, 20, 78005, 2, {"warps", "registers", "shared memory"}),
        ("sm_86", 6, 28, 0, 16, {"CTAs"}),
        ("sm_86", 454, 67, 69455, 1, {"registers", "shared memory"}),
        ("sm_89", 63, 20, 3135, 24, {"warps", "shared memory", "CTAs"}),
        ("sm_90a", 499, 20, 65590, 3, {"shared memory"}),
        ("sm_90a", 259, 22, 6755, 7, {"warps"}),
        ("sm_90a", 23, 64, 2910, 32, {"registers", "CTAs"}),
        ("sm_90a", 763, 24, 93383, 2, {"warps", "shared memory"}),
        ("sm_90a", 585, 230, 10849, 0, {"registers"}),
        ("sm_100f", 252, 221, 143878, 1, {"registers", "shared memory"}),
        ("sm_103a", 923, 25, 93420, 2, {"warps", "registers", "shared memory"}),
        ("sm_110a", 499, 20, 65590, 3, {"warps", "shared memory"}),
        ("sm_110a", 835, 44, 162298, 1, {"warps", "registers", "shared memory"}),
        ("sm_120a", 488, 40, 26669, 3, {"warps", "registers", "shared memory"}),
        ("sm_120a", 30, 10, 3134, 24, {"shared memory", "CTAs"}),
    ],
)
def test_ctas_and_what_limits_them(arch, threads, registers, shared, ctas, limits):
    fits = occupancy(arch, threads, registers, shared)
    assert (fits.ctas, set(fits.limits)) == (ctas, limits)
    assert fits.warps == ctas * -(-threads // 32)
    assert fits.share == fits.warps / fits.most_warps <= 1


def test_every_architecture_that_kernels_are_for_has_limits():
    assert all(occupancy(arch, 128, 32, 0) for arch in (*ARCHES, *FOREIGN))
    assert occupancy("sm_999z", 128, 32, 0) is None
