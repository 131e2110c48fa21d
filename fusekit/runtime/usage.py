"""What kernels hold on devices besides tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from fusekit.runtime.devices import Devices
    from fusekit.runtime.kernel import Kernel
    from fusekit.runtime.launch_plan import Loaded

K = TypeVar("K", bound="Kernel")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Device memory of one kernel, in bytes.

    Attributes
    ----------
    kernel : str
        Full name.
    device : int
        Ordinal.
    stream : int or None
        The handle of the stream whose launches use the memory; 1 for the legacy default stream, 2 for the default
        streams of threads. None: code, and workspaces that no stream has yet.
    code : int
        The size of the cubin. The driver may need more.
    workspace, scratch : int
        What was allocated, until the kernel is unloaded, by `Kernel.unload` or `Library.trim`.
    """

    kernel: str
    device: int
    stream: int | None
    code: int = 0
    workspace: int = 0
    scratch: int = 0


@dataclass(slots=True)
class Resources:
    """What a kernel holds: the driver's library (None: not loaded), and functions and memory by device. It keeps them
    until `unload`, even if its object is gone.
    """

    name: str
    code: int  # bytes of the cubin
    devices: Devices
    library: Any = None
    loaded: dict[int, Loaded] = field(default_factory=dict)

    def unload(self) -> None:
        """Frees all of it. No launch may be pending."""
        while self.loaded:
            _, loaded = self.loaded.popitem()
            for function_ in (loaded, *loaded.then):
                function_.function = None
            for memory in (loaded.workspaces, loaded.scratch):
                if memory is not None:
                    memory.close()
        library, self.library = self.library, None
        if library is not None:
            driver = self.devices.driver
            with self.devices.apart():
                driver.check(driver.api.cuLibraryUnload(library), "cuLibraryUnload")

    def rows(self) -> Iterator[MemoryUse]:
        for device, loaded in sorted(dict(self.loaded).items()):
            workspaces = Counter() if loaded.workspaces is None else loaded.workspaces.used()
            scratch = Counter() if loaded.scratch is None else loaded.scratch.used()
            yield MemoryUse(self.name, device, None, self.code, workspaces.pop(None, 0))
            for stream in sorted(key for key in {*workspaces, *scratch} if key is not None):
                yield MemoryUse(self.name, device, stream, 0, workspaces[stream], scratch[stream])


class Held:
    """The resources of the kernels that a library has loaded."""

    def __init__(self) -> None:
        self._pairs: list[tuple[ref[Kernel], Resources]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, kernel: K) -> K:
        """`kernel`, whose resources are held; those of unloaded kernels are forgotten."""
        for pair in [pair for pair in self._pairs if not pair[1].loaded]:
            with contextlib.suppress(ValueError):  # another thread was first
                self._pairs.remove(pair)
        self._pairs.append((ref(kernel), kernel.resources))
        return kernel

    def rows(self) -> list[MemoryUse]:
        """See `Library.memory`."""
        return [row for _, resources in list(self._pairs) for row in resources.rows()]

    def trim(self) -> int:
        """See `Library.trim`."""
        freed = 0
        for pair in list(self._pairs):
            kernel, resources = pair
            if kernel() is not None:
                continue
            rows, devices = list(resources.rows()), resources.devices
            for loaded in list(resources.loaded.values()):
                devices.refuse_capture(loaded.device, f"trim: unloading {resources.name}")
                with devices.apart():
                    devices.synchronize(loaded.device, f"trim: waiting for {loaded.device}")
            with contextlib.suppress(ValueError):  # another thread was first
                self._pairs.remove(pair)
                resources.unload()
                freed += sum(row.code + row.workspace + row.scratch for row in rows)
        return freed
