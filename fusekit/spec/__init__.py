"""Kernel specs: TOML to frozen, validated values.

| module | its job |
|---|---|
| `model` | `KernelSpec`, `Activation`, `Problem`: the values, their names and canonical form |
| `keys` | every key of a GEMM's spec: type, choices, default, meaning |
| `values` | one TOML value against one key |
| `token` | what specs of kernels that work token by token share |
| `router` | the router's operations: `RouterSpec`, their keys and rules |
| `permutation` | the operations between router and GEMM: `PermutationSpec`, their keys and rules |
| `exchange` | the operations between ranks: `ExchangeSpec`, their keys and rules |
| `quantise` | codes and scales of a tensor: `QuantiseSpec`, its keys and rules |
| `extern` | kernels that are not fusekit's: `ExternSpec`, its keys and rules |
| `family` | which keys an operation takes; `Spec`, any of the spec classes |
| `rules` | combinations of keys that cannot be built |
| `sweep` | a table's variants: what is swept, excluded, or chosen where it is left out |
| `document` | a file's bytes to its TOML document, within bounds |
| `parse` | a file: defaults, sweeps, all problems in one error |
| `catalog` | the packaged files; finding kernels by name or glob |
| `json_schema` | the JSON Schema of spec files |
| `operands` | what the arguments of a launch are, in words; operations.md beside it is the page |
| `config_fields`, `hf_config` | the MLPs and the router of a model, from its Hugging Face config |
| `model_kernels`, `new_spec` | the kernels of such a model, and the text of a spec file for them |

Each is imported on first use: a launch needs little of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.spec.catalog import find as find
    from fusekit.spec.catalog import packaged_files as packaged_files
    from fusekit.spec.extern import ExternSpec as ExternSpec
    from fusekit.spec.family import Spec as Spec
    from fusekit.spec.json_schema import schema as schema
    from fusekit.spec.model import Activation as Activation
    from fusekit.spec.model import KernelSpec as KernelSpec
    from fusekit.spec.model import Problem as Problem
    from fusekit.spec.parse import parse_file as parse_file
    from fusekit.spec.parse import parse_text as parse_text
    from fusekit.spec.permutation import PermutationSpec as PermutationSpec
    from fusekit.spec.router import RouterSpec as RouterSpec
    from fusekit.spec.token import TokenProblem as TokenProblem

_HOMES = {
    "Activation": "model", "ExternSpec": "extern", "KernelSpec": "model", "PermutationSpec": "permutation",
    "Problem": "model", "RouterSpec": "router", "Spec": "family", "TokenProblem": "token", "find": "catalog",
    "packaged_files": "catalog", "parse_file": "parse", "parse_text": "parse", "schema": "json_schema",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"fusekit.spec.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fusekit.spec' has no attribute '{name}'")
