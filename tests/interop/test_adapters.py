"""The examples for other packages' expert modules, on a layer whose kernels are their formulas."""

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torch._dynamo")
from tests.layers.host import host  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"dtype": "bf16", "grad_dtype": "bf16", "hidden": 64, "intermediate": 32, "experts": 8}


@pytest.fixture(autouse=True)
def uncompiled():
    """Megatron compiles small functions: minutes on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def stand_in(**said):
    return host(**SMALL, **said, router={"input": "choices"})


def test_torchtitan():
    pytest.importorskip("torchtitan.models.gpt_oss.moe", reason="torchtitan is not installed", exc_type=ImportError)
    activation = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    layer = stand_in(topk=4, bias=True, activation=activation, glu_layout="interleaved")
    runpy.run_path(str(EXAMPLES / "torchtitan_moe.py"))["check"](layer, "cpu")


def test_megatron():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    runpy.run_path(str(EXAMPLES / "megatron_moe.py"))["check"](stand_in(topk=1, b_major="n"), "cpu")
