"""What kernels hold on devices besides tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.runtime.devices import Devices
    from fusekit.runtime.launch_plan import Loaded


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
