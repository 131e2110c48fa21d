"""Kernel specs: TOML to frozen, validated values.

Each module is imported on first use: a launch needs little of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.spec.catalog import find as find
    from fusekit.spec.catalog import packaged_files as packaged_files
    from fusekit.spec.extern import ExternSpec as ExternSpec
    from fusekit.spec.json_schema import schema as schema
    from fusekit.spec.model import Activation as Activation
    from fusekit.spec.model import KernelSpec as KernelSpec
    from fusekit.spec.model import Problem as Problem
    from fusekit.spec.parse import parse_file as parse_file
    from fusekit.spec.parse import parse_text as parse_text
    from fusekit.spec.permutation import PermutationSpec as PermutationSpec
    from fusekit.spec.router import RouterSpec as RouterSpec
    from fusekit.spec.schemas import Spec as Spec
    from fusekit.spec.token import TokenProblem as TokenProblem

_HOMES = {
    "Activation": "model", "ExternSpec": "extern", "KernelSpec": "model", "PermutationSpec": "permutation",
    "Problem": "model", "RouterSpec": "router", "Spec": "schemas", "TokenProblem": "token", "find": "catalog",
    "packaged_files": "catalog", "parse_file": "parse", "parse_text": "parse", "schema": "json_schema",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"fusekit.spec.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fusekit.spec' has no attribute '{name}'")
