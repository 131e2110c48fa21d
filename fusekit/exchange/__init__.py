"""Expert parallelism between GPUs: windows (IPC buffers, a symmetric memory) into which ranks store each other's
rows; docs/expert-parallelism.md.

A rank has a window for each kernel of `moe-dispatch` or `moe-combine` that must not wait for another. All ranks launch
the kernels of a window in the same order. Nothing here imports a framework; processes find each other through the
caller's all-gather (`gather`).
"""

from fusekit.exchange.layout import Layout, Part
from fusekit.exchange.ranks import Ranks
from fusekit.exchange.windows import Window, between_processes, in_process

__all__ = ["Layout", "Part", "Ranks", "Window", "between_processes", "in_process"]
