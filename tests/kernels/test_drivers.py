"""Drivers know hooks and roles, operands know no architecture's folder: both from the source."""

import ast
from pathlib import Path

import pytest

from fusekit.plan.operands import operands, words
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD

GEMM = Path(__file__).parents[2] / "fusekit" / "kernels" / "gemm"
NAMES = {operand.name for operand in operands()}
ARGUMENTS = {name for epilogue in (FORWARD, BACKWARD, WGRAD) for name in words(epilogue)} | {"index"}
DRIVERS = sorted(path.name for path in (GEMM / "sm90").glob("*.py"))


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_knows_no_operand_by_name(name):
    tree = ast.parse((GEMM / "sm90" / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parameters = ast.unparse(node.value) in ("operands", "given", "work.operands", "idle.operands")
            assert not parameters or node.attr not in NAMES | ARGUMENTS, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("has", "get", "getattr"):
            message = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            assert not message & (NAMES | ARGUMENTS), ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            assert node.slice.value not in NAMES | ARGUMENTS, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and name != "kit.py":
            module = node.module or ""
            assert not module.startswith("fusekit.kernels.gemm.operands.") or module.endswith(".base"), module
        elif isinstance(node, ast.keyword) and node.arg == "barrier_id":
            assert not isinstance(node.value, ast.Constant), ast.unparse(node)


def test_operands_reach_their_architecture_through_the_kit_alone():
    for path in (*(GEMM / "operands").glob("*.py"), *GEMM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith("fusekit.kernels.gemm.sm")], path
            if isinstance(node, ast.keyword) and node.arg == "barrier_id":
                assert not isinstance(node.value, ast.Constant), ast.unparse(node)
