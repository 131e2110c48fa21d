"""The packaged providers: what they trace is what their specs describe. Each needs its extra."""

import importlib.util
import subprocess
import sys

import pytest

from fusekit.compiler.options import environment
from fusekit.spec.catalog import find

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

TRACE = """
import sys
from fusekit.compiler.extern import plan
from fusekit.spec.catalog import find
name, arch = sys.argv[1:]
(spec,) = (spec for spec in find([name]) if spec.arch == arch)
print(*(argument.name for argument in plan(spec).signature.arguments))
"""


@pytest.mark.parametrize(
    ("name", "arch", "arguments"),
    [
        ("quack/rmsnorm-residual@n4096", "sm_90a", "mX mW mRes mO mResO mRstd eps"),
        ("quack/gemm-varlen-m-sm100@tile256x256", "sm_100a", "mA mB mD cu_seqlens_m"),
        ("quack/gemm-gated@tile128x192-activation-swiglu", "sm_90a", "mA mB mD postact"),
        ("cudnn/quant-nvfp4@schedule-static", "sm_100a", "a b sfb d d_col sfa amax_tensor padded_offsets alpha prob"),
        ("cudnn/dense-amax-nvfp4@base", "sm_100a", "a_tensor b_tensor sfa_tensor sfb_tensor c_tensor amax_tensor"),
        ("cudnn/nvfp4-quantise@k4096", "sm_100a", "x encode_scale packed scales"),
        ("cudnn/wgrad-bf16@base", "sm_100a", "mat_a mat_b out offs"),
    ],
)
def test_arguments(name, arch, arguments, tmp_path):
    package = name.partition("/")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install '.[{package}]'")
    ran = subprocess.run(
        [sys.executable, "-c", TRACE, name, arch], env=environment(tmp_path, arch), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == arguments.split()


@pytest.mark.parametrize("name", ["quack", "cudnn"])
def test_every_argument_is_documented(name):
    """What a reader of `fusekit show` meets has words."""
    for spec in find([name]):
        for argument, table in spec.arguments.items():
            quiet = {"value", "bytes"} & table.keys()
            assert quiet or table.get("doc") or table == {"optional": True}, f"{spec.full_name}: {argument}"
