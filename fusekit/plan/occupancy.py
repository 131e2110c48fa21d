"""Occupancy: how many CTAs of a kernel fit onto a multiprocessor, and what limits them.

Rules and limits: CUDA's cuda_occupancy.h, and the table "Technical Specifications per Compute Capability" of the CUDA
C++ Programming Guide. A kernel that moves registers between its warps (setmaxnreg) is counted as it is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
_REGISTERS = 65536  # of a multiprocessor, and of a CTA at most
_REGISTER_UNIT = 256  # in which a warp gets its registers
_PARTITIONS = 4  # of a multiprocessor, with a quarter of its registers each
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024  # of every CTA
_MOST_THREADS = 1024  # of a CTA


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of a multiprocessor: warps, CTAs, bytes of shared memory."""

    warps: int
    ctas: int
    shared: int


_LARGE = _Limits(64, 32, 228 << 10)
_MIDDLE = _Limits(48, 24, 228 << 10)
_SMALL = _Limits(48, 24, 100 << 10)
# By the number of an architecture.
_LIMITS = {
    80: _Limits(64, 32, 164 << 10),
    86: _Limits(48, 16, 100 << 10),
    89: _SMALL,
    90: _LARGE,
    100: _LARGE,
    101: _MIDDLE,
    103: _LARGE,
    110: _MIDDLE,
    120: _SMALL,
    121: _SMALL,
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """CTAs on one multiprocessor, their warps, the most warps that it holds, and what limits them: `registers`,
    `shared memory`, `warps`, `CTAs`.
    """

    ctas: int
    warps: int
    most_warps: int
    limits: tuple[str, ...]

    @property
    def share(self) -> float:
        """The part of a multiprocessor's warps that are there, 0 to 1."""
        return self.warps / self.most_warps


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy | None:
    """The occupancy of a kernel for `arch`; None for an architecture without known limits.

    threads: of a CTA. registers: of a thread. shared: bytes of a CTA, static and dynamic, without what CUDA reserves.
    """
    number = arch.removeprefix("sm_").rstrip("af")
    limits = _LIMITS.get(int(number)) if number.isdecimal() else None
    if limits is None or threads < 1:
        return None
    warps = -(-threads // WARP)
    of_warp = _rounded(registers * WARP, _REGISTER_UNIT)
    taken = _rounded(shared + _RESERVED_SHARED, _SHARED_UNIT)
    most = {"warps": limits.warps // warps if threads <= _MOST_THREADS else 0, "CTAs": limits.ctas}
    most["shared memory"] = limits.shared // taken
    if of_warp:
        fits = of_warp * _rounded(warps, _PARTITIONS) <= _REGISTERS
        most["registers"] = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps if fits else 0
    ctas = min(most.values())
    return Occupancy(ctas, ctas * warps, limits.warps, tuple(name for name, count in most.items() if count == ctas))


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
