"""A CTA's shared memory as a list of named regions: its size, and where everything is."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BARRIER = 8  # bytes


@dataclass(frozen=True, slots=True)
class Region:
    """Memory with a name. arrivals: where the region is an array of barriers, how many arrivals each one waits for."""

    name: str
    bytes: int
    alignment: int = 16
    arrivals: tuple[int, ...] = ()


def barriers(name: str, *arrivals: int) -> Region:
    """A region of barriers, by their arrive counts."""
    return Region(name, BARRIER * len(arrivals), BARRIER, arrivals)


def pipeline(name: str, slots: int, full: int, empty: int) -> tuple[Region, Region]:
    """A full and an empty barrier for each slot of a pipeline, by their arrive counts."""
    return barriers(f"{name}_full", *(full,) * slots), barriers(f"{name}_empty", *(empty,) * slots)


class SharedMemory:
    """Regions one after the other, each at its alignment. bytes: of all."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = tuple(regions)
        self.offsets: dict[str, int] = {}
        end = 0
        for region in self.regions:
            start = -(-end // region.alignment) * region.alignment
            self.offsets[region.name] = start
            end = start + region.bytes
        self.bytes = end

    @property
    def barriers(self) -> Iterator[tuple[str, int, int]]:
        """(region, index, arrive count) of every barrier; those of a pipeline slot by slot."""
        groups: dict[str, list[Region]] = {}
        for region in self.regions:
            if region.arrivals:
                groups.setdefault(region.name.rpartition("_")[0] or region.name, []).append(region)
        for regions in groups.values():
            for index in range(max(len(region.arrivals) for region in regions)):
                yield from ((region.name, index, region.arrivals[index]) for region in regions)
