"""Kernel specs: TOML to frozen, validated values.

| module | its job |
|---|---|
| `model` | `KernelSpec`, `Activation`, `Problem`: the values, their names and canonical form |
| `keys` | every key of a spec file: type, choices, default, meaning |
| `values` | one TOML value against one key |
| `rules` | combinations of keys that cannot be built |
| `budget` | shared memory and register arithmetic |
| `parse` | a file: defaults, sweeps, all problems in one error |
| `catalog` | the packaged files; finding kernels by name or glob |
| `json_schema` | the JSON Schema of spec files |
"""

from fusekit.spec.budget import Budget
from fusekit.spec.catalog import find, packaged_files
from fusekit.spec.json_schema import schema
from fusekit.spec.model import Activation, KernelSpec, Problem, canonical_json
from fusekit.spec.parse import parse_file, parse_text

__all__ = [
    "Activation",
    "Budget",
    "KernelSpec",
    "Problem",
    "canonical_json",
    "find",
    "packaged_files",
    "parse_file",
    "parse_text",
    "schema",
]
