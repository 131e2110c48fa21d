"""Specs of foreign kernels, compiled and refused."""

import pytest

from fusekit.abi import LaunchRecord
from fusekit.errors import FusekitError
from fusekit.spec import parse_text

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

TWICE = """
arguments.x = { role = "input", shape = ["M", "N"], doc = "What is scaled." }
arguments.y = { role = "output", shape = ["M", "N"] }
"""
FILLED = """
arguments.y = { role = "output", shape = ["N"] }
arguments.memory = { role = "workspace", bytes = ["mul", 4, "N"] }
arguments.count = { value = ["mul", 2, "N"] }
"""
FLAGGED = 'arguments.y = { role = "output", shape = ["N"] }\n'


def spec_of(function, rest, arch="sm_90a"):
    """function: of foreignkernels, or another module's with its name before it."""
    source = function if ":" in function else f"foreignkernels:{function}"
    text = f"""schema = 1
        [[kernel]]
        name = "k"
        op = "extern"
        source = "{source}"
        arch = "{arch}"
        {rest}"""
    (spec,) = parse_text(text, "own")
    return spec


def compiled(tmp_path, function, rest, arch="sm_90a"):
    from fusekit.compiler.trace import compile_plan
    from fusekit.compiler.worker import plan

    result = compile_plan(plan(spec_of(function, rest, arch)), tmp_path)
    return LaunchRecord.from_json(result.launch), result


def refused(function, rest):
    from fusekit.compiler.worker import plan

    with pytest.raises(FusekitError) as error:
        plan(spec_of(function, rest))
    return str(error.value)
