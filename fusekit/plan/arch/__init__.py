"""What each architecture offers: a file of its name, with a row of facts. A kernel's key follows its own row alone.

Another architecture is another file here, and another kernel folder.
"""

from importlib import import_module
from pathlib import Path

from fusekit.plan.arch.base import Architecture

__all__ = ["ARCHES", "ARCHITECTURES", "Architecture"]

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("sm_*.py"))
ARCHITECTURES: dict[str, Architecture] = {name: import_module(f"{__name__}.{name}").ROW for name in _NAMES}
ARCHES = tuple(ARCHITECTURES)
