"""`fusekit run` of backward kernels and weight gradients, over a stand-in for the driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusekit.abi import Dim, LaunchRecord, PointerParameter, TensorArgument
from tests.cli.standin import past_the_end, pointers, run

WGRAD = """
schema = 1
[[kernel]]
name = "dw"
op = "grouped-wgrad"
arch = "sm_90a"
out_dtype = "f32"
accumulate = {accumulate}
dbias = true
tile = [64, 64]
problem = {{ E = 5, M = 150, N = 136, K = 72 }}
"""


def weight_gradients(accumulate: bool) -> LaunchRecord:
    tensors = (
        TensorArgument("dy", "input", "bf16", ("M", "N"), ("dy.stride0", 1), 8),
        TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
        TensorArgument("dw", "inout" if accumulate else "output", "f32", ("E", "N", "K"), (["mul", "N", "K"], "K", 1)),
        TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
        TensorArgument("dbias", "inout" if accumulate else "output", "f32", ("E", "N"), ("N", 1), alignment=4),
    )
    return pointers(tensors, Dim("M"), Dim("E", 1, 1), Dim("N", 8, 8), Dim("K", 8, 8))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("harm", [None, "last group", "one element", "after the end", "dbias"])
def test_weight_gradients(install: Any, capsys: Any, accumulate: bool, harm: str | None) -> None:
    def hurt(outputs: dict[str, Any]) -> None:
        if harm == "last group":
            outputs["dw"][4] = outputs["dw"][3]
        elif harm == "one element":
            outputs["dw"].view(np.uint32)[3, 135, 0] = 0xFFFFFFFF
        elif harm == "after the end":
            past_the_end(outputs, "dw")
        elif harm == "dbias":
            outputs["dbias"][4] = outputs["dbias"][3]

    text = WGRAD.format(accumulate=str(accumulate).lower())
    shapes = {"dy": (150, 136), "x": (150, 72), "dw": (5, 136, 72), "offsets": (5,), "dbias": (5, 136)}
    install(text, weight_gradients(accumulate))(hurt, shapes)
    code, document = run(capsys, "made/dw", "--check", "--time")
    assert code == (1 if harm else 0), document["problems"]
    assert document["problem"] == {"E": 5, "M": 150, "N": 136, "K": 72}
    assert document["tflops"] == pytest.approx(2 * 145 * 136 * 72 / 2e-3 * 1e-12)
    if harm:
        said = {
            "last group": "dw: WRONG",
            "one element": "1 elements were not written, the first at 3, 135, 0",
            "dbias": "dbias: WRONG",
        }
        assert any(said.get(harm, "dw: the 4096 bytes after") in problem for problem in document["problems"])
    else:
        assert document["error"]["fro"] < 1e-6


def dense_weight_gradients(accumulate: bool) -> LaunchRecord:
    role = "inout" if accumulate else "output"
    tensors = (
        TensorArgument("dy", "input", "bf16", ("M", "N"), ("dy.stride0", 1), 8),
        TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
        TensorArgument("dw", role, "f32", ("N", "K"), ("K", 1)),
        TensorArgument("dbias", role, "f32", ("N",), (1,), alignment=4),
    )
    parameters = tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors))
    return replace(
        weight_gradients(accumulate), arguments=tensors, dims=(Dim("M"), Dim("N", 8, 8), Dim("K", 8, 8)),
        parameters=parameters,
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("harm", [None, "last row", "after the end", "dbias"])
def test_weight_gradients_of_a_dense_layer(install: Any, capsys: Any, accumulate: bool, harm: str | None) -> None:
    def hurt(outputs: dict[str, Any]) -> None:
        if harm == "last row":
            outputs["dw"][135] = outputs["dw"][134]
        elif harm == "after the end":
            past_the_end(outputs, "dw")
        elif harm == "dbias":
            outputs["dbias"][135] = outputs["dbias"][134]

    text = WGRAD.format(accumulate=str(accumulate).lower()).replace("grouped", "dense").replace("E = 5", "E = 1")
    shapes = {"dy": (150, 136), "x": (150, 72), "dw": (136, 72), "dbias": (136,)}
    install(text, dense_weight_gradients(accumulate))(hurt, shapes)
    code, document = run(capsys, "made/dw", "--check", "--time")
    assert code == (1 if harm else 0), document["problems"]
    assert document["tflops"] == pytest.approx(2 * 150 * 136 * 72 / 2e-3 * 1e-12)
    said = {"last row": "dw: WRONG", "dbias": "dbias: WRONG", "after the end": "dw: the 4096 bytes after"}
    assert harm is None or any(said[harm] in problem for problem in document["problems"])


BACKWARD = """
schema = 1
[[kernel]]
name = "dz"
op = "grouped-gemm"
arch = "sm_90a"
activation = { kind = "dswiglu", limit = 1.5 }
glu_layout = "interleaved"
row_scale = true
recompute = true
dprob = true
dbias = true
tile = [128, 64]
problem = { E = 5, M = 150, N = 136, K = 72 }
"""


def backward_record() -> LaunchRecord:
    double = ("mul", 2, "N")
    tensors = (
        TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
        TensorArgument("w", "input", "bf16", ("E", "N", "K"), ("w.stride0", "w.stride1", 1), 8),
        TensorArgument("preactivation", "input", "bf16", ("M", double), ("preactivation.stride0", 1), 8),
        TensorArgument("row_scale", "input", "f32", ("M",), (1,), alignment=4),
        TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
        TensorArgument("dz", "output", "bf16", ("M", double), ("dz.stride0", 1), 8),
        TensorArgument("y", "output", "bf16", ("M", "N"), ("y.stride0", 1), 8),
        TensorArgument("dprob", "output", "f32", ("M",), (1,), alignment=4),
        TensorArgument("dbias", "output", "f32", ("E", double), (double, 1), alignment=4),
    )
    return pointers(tensors, Dim("M"), Dim("E", 1, 1), Dim("N", 8, 8), Dim("K", 8, 8))


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("harm", [None, "dz", "y", "dprob", "dbias", "spare row of dprob"])
def test_a_backward_kernel(install: Any, capsys: Any, harm: str | None) -> None:
    def hurt(outputs: dict[str, Any]) -> None:
        if harm == "spare row of dprob":
            outputs["dprob"][149] = 0
        elif harm:
            outputs[harm][0] = outputs[harm][1]

    shapes = {
        "x": (150, 72), "w": (5, 136, 72), "preactivation": (150, 272), "row_scale": (150,), "offsets": (5,),
        "dz": (150, 272), "y": (150, 136), "dprob": (150,), "dbias": (5, 272),
    }  # fmt: skip
    install(BACKWARD, backward_record())(hurt, shapes)
    code, document = run(capsys, "made/dz", "--check", "--time")
    assert code == (1 if harm else 0), document["problems"]
    assert document["tflops"] == pytest.approx(2 * 145 * 136 * 72 / 2e-3 * 1e-12)
    if harm:
        said = "dprob: row 149, which no group owns, was written to" if " " in harm else f"{harm}: WRONG"
        assert any(said in problem for problem in document["problems"])
    else:
        assert 0 < document["error"]["max_scaled"] <= 1
