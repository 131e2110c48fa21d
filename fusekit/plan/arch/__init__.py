"""What each architecture offers: a file of its name, with a row of facts. A kernel's key follows its own row alone.

Another architecture is another file here, and another kernel folder.
"""

from importlib import import_module
from pathlib import Path

from fusekit.plan.arch.base import Architecture

__all__ = ["ARCHES", "ARCHITECTURES", "DEFAULT", "FOREIGN", "Architecture", "arch_hint"]

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("sm_*.py"))
ARCHITECTURES: dict[str, Architecture] = {name: import_module(f"{__name__}.{name}").ROW for name in _NAMES}
ARCHES = tuple(ARCHITECTURES)
DEFAULT = next(row for row in ARCHITECTURES.values() if row.default)
FOREIGN = (
    "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_100f", "sm_101a", "sm_103a", "sm_103f", "sm_110a", "sm_110f",
    "sm_120a", "sm_120f", "sm_121a",
)  # fmt: skip
"""What a foreign kernel may be for: what the compiler knows."""


def arch_hint(word: str, _: tuple[str, ...]) -> str | None:
    """The hint of an architecture that fusekit has no kernels for."""
    return f'; only a foreign kernel (op = "extern") can be for {word}' if word in FOREIGN else None
