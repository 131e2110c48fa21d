"""`fusekit run` over a stand-in for the driver whose kernel is the reference itself."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.abi import Dim, LaunchRecord, PointerParameter, TensorArgument
from fusekit.bench import compare
from fusekit.compiler.gemm import signature
from fusekit.config import Config
from fusekit.reference import BY_GROUP, coded_outputs, encode, gemm
from fusekit.reference.coded import written
from fusekit.reference.meaning import meaning
from fusekit.spec import parse_text
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit_cli.main import main
from tests.runtime.fake import FakeDriver, Launched
from tests.runtime.samples import CUBIN

SPEC = """
schema = 1
summary = "made up"
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
dtype = "bf16"
bias = true
save_preactivation = true
activation = { kind = "swiglu" }
glu_layout = "interleaved-32"
tile = [128, 128]
cluster = [2, 1]
problem = { E = 3, M = 150, N = 256, K = 64 }
"""
NAME = "made/fc1@128x128-c2x1-dynamic"


def record() -> LaunchRecord:
    """Every tensor by its address: the stand-in for the kernel finds them in the parameters."""
    double = ("mul", 2, "I")
    tensors = (
        TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
        TensorArgument("w", "input", "bf16", ("E", double, "K"), ("w.stride0", "w.stride1", 1), 8),
        TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
        TensorArgument("bias", "input", "bf16", ("E", double), (double, 1)),
        TensorArgument("y", "output", "bf16", ("M", "I"), ("y.stride0", 1), 8),
        TensorArgument("preactivation", "output", "bf16", ("M", double), ("preactivation.stride0", 1), 8),
    )
    return LaunchRecord(
        symbol="kernel",
        arch="sm_90a",
        arguments=tensors,
        dims=(Dim("M"), Dim("K", 8, 8), Dim("E", 1, 1), Dim("I", 32, 32)),
        parameters=tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors)),
        grid=(1, 1, 1),
        block=(128, 1, 1),
        skip_if_zero=("M",),
    )


def store_codes(spec: Any, arrays: dict[str, Any]) -> None:
    """The results that the kernel stores as codes."""
    means = meaning(spec)
    if means.recipe.coded:
        kept = spec.canonical() | {"quant": spec.quant + ("" if means.recipe.keep else " keep=true")}
        results = {name: encode(values, "bf16") for name, values in gemm(kept, arrays).items()}
        for name, codes in coded_outputs(means, results, arrays["offsets"]).items():
            where = written(name, codes.shape, arrays["offsets"])
            arrays[name][where] = codes[where]


Harm = Callable[[dict[str, Any]], None]


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, LaunchRecord], Callable[..., FakeDriver]]:
    """Puts the kernel of a spec's text into a store; what it gives starts a GPU that computes it."""

    def publish(text: str, made: LaunchRecord) -> Callable[..., FakeDriver]:
        (spec,) = parse_text(text, "made", "made.toml")
        store = Store.open(Config(store=tmp_path))
        fields = {"arch": "sm_90a"}
        digest = hashlib.sha256(CUBIN).hexdigest()
        entry = Entry(key_of(fields), fields, digest, len(CUBIN), made.to_json(), {}, {}, {}, 1.0)
        store.publish(entry, CUBIN)
        canonical = json.loads(json.dumps(spec.canonical()))
        store.publish_name(NameRecord(spec.full_name, "sm_90a", entry.key, canonical, {"cluster_margin": 0}))
        monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path))
        dtypes = {tensor.name: tensor.dtype for tensor in made.tensors}

        def start(harm: Harm, shapes: dict[str, tuple[int, ...]]) -> FakeDriver:
            """`harm` changes what was written; `shapes` stand in the order of the parameters."""

            def compute(launched: Launched) -> None:
                if launched.stream:  # timed launches have a stream of their own
                    return
                arrays = {}
                for (name, shape), parameter in zip(shapes.items(), launched.parameters, strict=True):
                    kind = {"i32": np.int32, "f32": np.float32, "e4m3": np.uint8}.get(dtypes[name], np.uint16)
                    count = int(np.prod(shape))
                    memory = (ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(
                        *struct.unpack("<Q", parameter)
                    )
                    arrays[name] = np.frombuffer(memory, kind).reshape(shape)
                store_codes(spec, arrays)
                for name, values in gemm(spec, arrays).items():
                    written = len(values) if name in BY_GROUP else int(arrays["offsets"][-1])
                    arrays[name][:written] = encode(values[:written], dtypes[name])
                harm(arrays)

            fake = FakeDriver([(parameter.offset, parameter.size) for parameter in made.parameters])
            fake.on_launch = compute
            monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: fake)
            return fake

        return start

    return publish


@pytest.fixture
def machine(install: Any) -> Callable[..., FakeDriver]:
    """A store with one kernel, and a GPU that computes it; `harm` changes what it wrote."""
    installed = install(SPEC, record())

    def start(harm: Harm = lambda outputs: None, rows: int = 150) -> FakeDriver:
        shapes = {
            "x": (rows, 64), "w": (3, 256, 64), "offsets": (3,), "bias": (3, 256), "y": (rows, 128),
            "preactivation": (rows, 256),
        }  # fmt: skip
        return installed(harm, shapes)

    return start


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["run", *arguments, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


@pytest.mark.parametrize("whole", [True, False])
def test_a_right_result_is_ok(machine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 24)
    machine()
    code, document = run(capsys, "made/fc1", "--check", "--time", "--cluster-margin", "2")
    assert code == 0
    assert document["name"] == NAME
    assert document["ok"] is True
    assert 0 < document["error"]["fro"] < 2.5e-3
    assert document["error"]["max_scaled"] <= 1
    assert document["problem"] == {"E": 3, "M": 150, "N": 256, "K": 64}
    assert document["ms"] == 2.0
    assert document["tflops"] == pytest.approx(2 * 145 * 256 * 64 / 2e-3 * 1e-12)
    assert document["host_us"] > 0
    assert 0 < document["peak_share"] < 1


def wrong_row(outputs: dict[str, Any]) -> None:
    last = outputs["offsets"][0] - 1
    outputs["y"][last, 100:] = outputs["y"][last - 1, 100:]


def spare_row(outputs: dict[str, Any]) -> None:
    outputs["preactivation"][-1, 3] = 0


def left_out(outputs: dict[str, Any]) -> None:
    outputs["y"][7, 5] = 0xFFFF


def past_the_end(outputs: dict[str, Any], name: str = "y") -> None:
    ctypes.memset(outputs[name].ctypes.data + outputs[name].nbytes, 0, 2)


def before_the_start(outputs: dict[str, Any]) -> None:
    ctypes.memset(outputs["y"].ctypes.data - 2, 0, 2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (wrong_row, "y: WRONG"),
        (spare_row, "preactivation: row 149, which no group owns, was written to"),
        (left_out, "y: 1 elements were not written, the first at 7, 5"),
        (past_the_end, "y: the 4096 bytes after the buffer were written to"),
        (before_the_start, "y: the 4096 bytes before the buffer were written to"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_result_is_noticed(
    machine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, harm: Harm, message: str, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 0)
    machine(harm)
    code, document = run(capsys, NAME, "--check")
    assert code == 1
    assert document["ok"] is False
    assert any(message in problem for problem in document["problems"])
    assert main(["run", NAME, "--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


CODED = """
schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
quant = {{ out = "fp8-block", transpose = true, keep = {keep} }}
activation = {{ kind = "swiglu" }}
tile = [128, 256]
problem = {{ E = 3, M = 300, N = 416, K = 64 }}
"""
CODED_SHAPES = {
    "x": (300, 64), "w": (3, 416, 64), "y": (300, 208), "y_q": (300, 208), "y_s": (2, 300), "y_t": (208, 768),
    "y_ts": (6, 208), "offsets": (3,),
}  # fmt: skip


def wrong_code(outputs: dict[str, Any]) -> None:
    outputs["y_t"][200, 3] ^= 1


def spare_code(outputs: dict[str, Any]) -> None:
    outputs["y_q"][-1, 3] = 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("harm", "messages"),
    [
        (lambda outputs: None, ()),
        (wrong_code, ("y_t: 1 elements of tokens 0 to ", "y_t: ")),
        (spare_code, ("y_q: 1 elements written, of no group's, the first at (299, 3)",) * 2),
    ],
)
def test_results_as_codes(install: Any, capsys: Any, keep: bool, harm: Harm, messages: tuple[str, ...]) -> None:
    text = CODED.format(keep=str(keep).lower())
    (spec,) = parse_text(text, "made", "made.toml")
    made = signature(spec)
    tensors = tuple(argument for argument in made.arguments if isinstance(argument, TensorArgument))
    parameters = tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors))
    whole = LaunchRecord(
        symbol="kernel",
        arch="sm_90a",
        arguments=tensors,
        dims=made.dims,
        parameters=parameters,
        grid=(1, 1, 1),
        block=(128, 1, 1),
        skip_if_zero=("M",),
    )
    install(text, whole)(harm, {name: CODED_SHAPES[name] for name in (tensor.name for tensor in tensors)})
    code, document = run(capsys, "made/fc1", "--check")
    if not messages:
        assert (code, document["ok"], document["problems"]) == (0, True, [])
    else:
        assert code == 1
        assert any(line.startswith(messages[0 if keep else 1]) for line in document["problems"])


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
    return LaunchRecord(
        symbol="kernel",
        arch="sm_90a",
        arguments=tensors,
        dims=(Dim("M"), Dim("E", 1, 1), Dim("N", 8, 8), Dim("K", 8, 8)),
        parameters=tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors)),
        grid=(1, 1, 1),
        block=(128, 1, 1),
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("harm", [None, "last group", "one element", "after the end", "dbias"])
def test_weight_gradients(
    install: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, accumulate: bool, whole: bool, harm: str | None
) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE_ELEMENTS", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 24)

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
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("harm", [None, "last row", "after the end", "dbias"])
def test_weight_gradients_of_a_dense_layer(
    install: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, accumulate: bool, whole: bool, harm: str | None
) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE_ELEMENTS", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 24)

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
    return LaunchRecord(
        symbol="kernel",
        arch="sm_90a",
        arguments=tensors,
        dims=(Dim("M"), Dim("E", 1, 1), Dim("N", 8, 8), Dim("K", 8, 8)),
        parameters=tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors)),
        grid=(1, 1, 1),
        block=(128, 1, 1),
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("harm", [None, "dz", "y", "dprob", "dbias", "spare row of dprob"])
def test_a_backward_kernel(
    install: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, whole: bool, harm: str | None
) -> None:
    if not whole:
        monkeypatch.setattr(compare, "WHOLE", 0)
        monkeypatch.setattr(compare, "SAMPLED_ROWS", 24)

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


def test_without_rows_nothing_is_launched_and_all_is_well(machine: Any, capsys: Any) -> None:
    fake = machine(rows=0)
    code, document = run(capsys, "made", "--check", "--rows", "0", "--time")
    assert code == 0
    assert document["problem"]["M"] == 0
    assert document["tflops"] is None
    assert not fake.launches


def test_text_for_people(machine: Any, capsys: Any) -> None:
    machine()
    assert main(["run", "made/*", "--check", "--time"]) == 0
    text = capsys.readouterr().out
    assert f"{NAME} (sm_90a) on FAKE H200, E=3 M=150 N=256 K=64: ok" in text
    assert "2 ms, " in text
    assert " us a launch" in text


def test_device_memory_is_given_back(machine: Any, capsys: Any) -> None:
    fake = machine()
    run(capsys, "made/fc1", "--check", "--time")
    assert not fake.memory
    assert fake.loaded == 0


def test_what_cannot_run_says_why(machine: Any, capsys: Any) -> None:
    machine()
    assert main(["run", "made/fc1", "--rows", str(2**31)]) == 2
    assert "takes at most 2147483647; give fewer --rows" in capsys.readouterr().err
    assert main(["run", "made/other"]) == 3
    assert "fusekit build made.toml/other" in capsys.readouterr().err
    machine().devices = 0
    assert main(["run", "made/fc1"]) == 4
    assert "the driver sees no GPU" in capsys.readouterr().err
    machine().version = 11000
    assert main(["run", "made/fc1"]) == 4
    assert "CUDA 11.0" in capsys.readouterr().err
    machine().capability = (8, 0)
    assert main(["run", "made/fc1"]) == 4
    assert "expected a device of sm_90a, found device 0 (FAKE H200, sm_80)" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["lost a byte", "other bytes", "another cubin", "another entry"])
def test_a_damaged_store_is_never_launched_from(machine: Any, capsys: Any, tmp_path: Path, damage: str) -> None:
    fake, store = machine(), Store.open(Config(store=tmp_path))
    (named,) = store.names("made/*")
    entry = store.find_entry(named.record.key)
    assert entry is not None
    path = store.layers[0].blob_path(entry.cubin_sha256)
    if damage == "another entry":
        path = store.layers[0].entry_path(entry.key)
        fields = {"arch": "sm_100a"}
        other = replace(entry, key=key_of(fields), fields=fields, launch={**entry.launch, **fields})
        store.publish(other, CUBIN)
        data = store.layers[0].entry_path(other.key).read_bytes()
    else:
        whole = path.read_bytes()
        data = {"lost a byte": whole[:-1], "other bytes": whole[:-1] + b"!", "another cubin": whole * 2}[damage]
    path.chmod(0o644)
    path.write_bytes(data)
    assert main(["run", "made/fc1", "--check"]) == 1
    message = capsys.readouterr().err
    assert str(path) in message
    assert "build" in message
    assert not fake.launches
    assert fake.loaded == 0
