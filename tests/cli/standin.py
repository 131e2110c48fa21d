"""`fusekit run` over a stand-in for the driver, whose kernel is the reference itself."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.abi import Dim, LaunchRecord, PointerParameter, TensorArgument
from fusekit.config import Config
from fusekit.reference import BY_GROUP, coded_outputs, encode, gemm
from fusekit.reference.fp8_output import written
from fusekit.reference.meaning import meaning
from fusekit.spec import parse_text
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit_cli.main import main
from tests.runtime.fake import FakeDriver, Launched
from tests.runtime.samples import CUBIN

SPEC = """
schema = 1
summary = "for tests"
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


def pointers(tensors: tuple[TensorArgument, ...], *dims: Dim, **more: Any) -> LaunchRecord:
    """Every tensor by its address: the stand-in for the kernel finds them in the parameters."""
    parameters = tuple(PointerParameter(tensor.name, tensor.name, 8 * i) for i, tensor in enumerate(tensors))
    return LaunchRecord(
        symbol="kernel", arch="sm_90a", arguments=tensors, dims=dims, parameters=parameters, grid=(1, 1, 1),
        block=(128, 1, 1), **more,
    )  # fmt: skip


def record() -> LaunchRecord:
    double = ("mul", 2, "I")
    tensors = (
        TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
        TensorArgument("w", "input", "bf16", ("E", double, "K"), ("w.stride0", "w.stride1", 1), 8),
        TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
        TensorArgument("bias", "input", "bf16", ("E", double), (double, 1)),
        TensorArgument("y", "output", "bf16", ("M", "I"), ("y.stride0", 1), 8),
        TensorArgument("preactivation", "output", "bf16", ("M", double), ("preactivation.stride0", 1), 8),
    )
    return pointers(tensors, Dim("M"), Dim("K", 8, 8), Dim("E", 1, 1), Dim("I", 32, 32), skip_if_zero=("M",))


def store_fp8(spec: Any, arrays: dict[str, Any]) -> None:
    """Store the outputs that the kernel quantizes."""
    means = meaning(spec)
    if means.quant.coded:
        kept = spec.canonical() | {"quant": spec.quant.canonical() + ("" if means.quant.keep else " keep=true")}
        results = {name: encode(values, "bf16") for name, values in gemm(kept, arrays).items()}
        for name, fp8 in coded_outputs(means, results, arrays["offsets"]).items():
            where = written(means, name, fp8.shape, arrays["offsets"])
            arrays[name][where] = fp8[where]


Harm = Callable[[dict[str, Any]], None]


def past_the_end(outputs: dict[str, Any], name: str = "y") -> None:
    ctypes.memset(outputs[name].ctypes.data + outputs[name].nbytes, 0, 2)


def installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, LaunchRecord], Callable[..., FakeDriver]]:
    """Puts the kernel of a spec's text into a store; what it gives starts a GPU that computes it."""

    def publish(text: str, launch_record: LaunchRecord) -> Callable[..., FakeDriver]:
        (spec,) = parse_text(text, "made", "made.toml")
        store = Store.open(Config(store=tmp_path))
        fields = {"arch": "sm_90a"}
        digest = hashlib.sha256(CUBIN).hexdigest()
        entry = Entry(key_of(fields), fields, digest, len(CUBIN), launch_record.to_json(), {}, {}, {}, 1.0)
        store.publish(entry, CUBIN)
        canonical = json.loads(json.dumps(spec.canonical()))
        store.publish_name(NameRecord(spec.full_name, "sm_90a", entry.key, canonical, {"cluster_margin": 0}))
        monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path))
        dtypes = {tensor.name: tensor.dtype for tensor in launch_record.tensors}

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
                store_fp8(spec, arrays)
                for name, values in gemm(spec, arrays).items():
                    written = len(values) if name in BY_GROUP else int(arrays["offsets"][-1])
                    arrays[name][:written] = encode(values[:written], dtypes[name])
                harm(arrays)

            fake = FakeDriver([(parameter.offset, parameter.size) for parameter in launch_record.parameters])
            fake.on_launch = compute
            monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: fake)
            return fake

        return start

    return publish


def machine_of(install: Any) -> Callable[..., FakeDriver]:
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
