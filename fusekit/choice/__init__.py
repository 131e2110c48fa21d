"""Which variant of a kernel fits a problem; data in, data out.

| module | its job |
|---|---|
| `model` | the time of a GEMM variant, from its spec alone |
"""

from fusekit.choice.model import cost, rank

__all__ = ["cost", "rank"]
