"""PyTorch's unfused twins mean what the kernels mean: every kernel of the GPU tests' matrices, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.reference import encode, gemm, make_inputs
from fusekit.spec import KernelSpec, parse_file

torch = pytest.importorskip("torch")

GPU = Path(__file__).parents[1] / "gpu"
SPECS = {spec.full_name: spec for name in ("matrix.toml", "matrix_backward.toml") for spec in parse_file(GPU / name)}
SIZES = [40, 0, 17, 71]
# What eager code loses by rounding each of its steps to 16 bits, and torch._grouped_mm its float32 weight gradient.
NEAR = 1.5e-2


def tensor(value: Any, dtype: str) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    return tensor.view(torch.bfloat16 if dtype == "bf16" else torch.float16) if value.dtype == np.uint16 else tensor


def twin(spec: KernelSpec, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(outputs of the twin, outputs by the reference)"""
    from fusekit.bench.torch_gemm import Unfused

    sizes = SIZES if spec.grouped else [128]
    inputs = make_inputs(spec, E=len(sizes), M=128, N=64 * 3, K=72, sizes=sizes, seed=2)
    if "index" in inputs:
        inputs["index"] = np.maximum(inputs["index"], 0)  # -1 names no row, which PyTorch cannot say
    if "preactivation" in inputs:  # versions of PyTorch differ in the gradient at the limit itself
        edge = encode(np.array([spec.defaults().get("act_limit", np.inf)]), spec.dtype)
        inputs["preactivation"][np.isin(inputs["preactivation"] & 0x7FFF, edge)] = 0
    canonical = json.loads(json.dumps(spec.canonical()))
    tensors = {name: tensor(value, spec.dtype) for name, value in inputs.items() if isinstance(value, np.ndarray)}
    scalars = spec.defaults() | {name: value for name, value in inputs.items() if isinstance(value, float)}
    return Unfused(canonical, tensors, scalars, sizes, how)(), gemm(spec, inputs)


@pytest.mark.parametrize("how", ["grouped", "loop"])
@pytest.mark.parametrize("name", SPECS)
def test_twin(name: str, how: str) -> None:
    spec = SPECS[name]
    got, want = twin(spec, how)
    assert set(got) == set(want)
    for output, value in want.items():
        values = got[output].float().numpy().astype(np.float64)
        assert values.shape == value.shape, output
        apart = np.linalg.norm(values - value) / np.linalg.norm(value)
        assert apart < NEAR, (output, apart)


def test_distance() -> None:
    from fusekit.bench.torch_gemm import distance

    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert distance(a, a) == 0.0
    assert distance(b, a) == pytest.approx(0.1)
    assert distance(torch.tensor([float("nan"), 1.0]), a) != distance(torch.tensor([float("nan"), 1.0]), a)
