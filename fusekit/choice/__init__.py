"""Which variant of a kernel is taken for a problem; data in, data out.

| module | its job |
|---|---|
| `model` | the time of a GEMM variant, from its spec alone |
| `tuning` | tables of measured times; `tuning-<arch>.json` comes with fusekit |
| `variants` | the choice: a table where one knows the problem, else the model |
"""

from fusekit.choice.model import cost, rank

__all__ = ["cost", "rank"]
