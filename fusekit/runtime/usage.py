"""Device memory that kernels use besides tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        What was allocated, until the kernel is unloaded.
    """

    kernel: str
    device: int
    stream: int | None
    code: int = 0
    workspace: int = 0
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """Name, size of the cubin, and what is loaded, by device: a kernel that nobody unloads keeps its memory, even if
    its object is gone.
    """

    name: str
    code: int
    loaded: Mapping[int, Loaded]

    def rows(self) -> Iterator[MemoryUse]:
        for device, loaded in sorted(dict(self.loaded).items()):
            workspaces = Counter() if loaded.workspaces is None else loaded.workspaces.used()
            scratch = Counter() if loaded.scratch is None else loaded.scratch.used()
            yield MemoryUse(self.name, device, None, self.code, workspaces.pop(None, 0))
            for stream in sorted(key for key in {*workspaces, *scratch} if key is not None):
                yield MemoryUse(self.name, device, stream, 0, workspaces[stream], scratch[stream])
