"""Launch records, tensors and stores for the runtime's tests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusekit.abi import (
    Constraint,
    Dim,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    LaunchStep,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
    TensorMapParameter,
)
from fusekit.config import Config
from fusekit.library import Library
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.runtime.tensors import compact_strides
from fusekit.store import Entry, NameRecord, Store, key_of
from tests.cubins import cubin_of
from tests.runtime.fake import FakeDriver

CUBIN = cubin_of("kernel", "second", "check", "other")
SPEC = {
    "op": "grouped-gemm",
    "tile": [128, 160],
    "cluster": [2, 1],
    "problem": {"E": 4, "M": 1024, "N": 320, "K": 128},
}


def again(launch_record: LaunchRecord) -> LaunchRecord:
    """`made`, written down and read."""
    return LaunchRecord.from_json(json.loads(json.dumps(launch_record.to_json(), allow_nan=False)))


def over_x() -> LaunchRecord:
    """The same with an output dx [M, K] that may lie over x."""
    launch_record = record()
    dx = TensorArgument("dx", "output", "bf16", ("M", "K"), ("dx.stride0", 1), 8, in_place_of="x")
    pointer = PointerParameter("dx_pointer", "dx", 296)
    return record(arguments=(*launch_record.arguments, dx), parameters=(*launch_record.parameters, pointer))


def following() -> LaunchRecord:
    """Two launches: the first from 65 rows on, its block and shared memory following the arguments, with a preferred
    cluster; the second always.
    """
    launch_record = record()
    step = LaunchStep((PointerParameter("y_pointer", "y", 0),), ("E", 1, 1), (32, 1, 1), symbol="second")
    return record(
        when=("lt", 64, "M"), block=(("mul", 32, ("min", "E", 33)), 1, 1), dynamic_shared=("mul", 8, "I"),
        preferred_cluster=(4, 1, 1), then=(step,), parameters=launch_record.parameters,
    )  # fmt: skip


def with_workspace(**changes: Any) -> LaunchRecord:
    """`record`, and a workspace of 64 zeros for each multiprocessor."""
    parameters = (*record().parameters, PointerParameter("scratch", "workspace", 296))
    return record(parameters=parameters, workspace=("mul", "sm_count", 64), workspace_zeroed=True, **changes)


def record(**changes: Any) -> LaunchRecord:
    """A grouped GEMM with a gated activation: x [M, K], w [E, 2I, K], offsets [E], y [M, I] and two scalars."""
    parts: dict[str, Any] = {
        "symbol": "kernel",
        "arch": "sm_90a",
        "arguments": (
            TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), stride_divisor=8),
            TensorArgument(
                "w", "input", "bf16", ("E", ("mul", 2, "I"), "K"), ("w.stride0", "w.stride1", 1), stride_divisor=8
            ),
            TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
            TensorArgument("y", "output", "bf16", ("M", "I"), ("y.stride0", 1), stride_divisor=8),
            ScalarArgument("act_limit", "f32", float("inf")),
            ScalarArgument("act_alpha", "f32"),
        ),
        "dims": (Dim("M"), Dim("K", 8, 8), Dim("E", minimum=1), Dim("I", 8, 8)),
        "constraints": (Constraint(("mod", "I", 16), "I must be a multiple of 16 for this layout"),),
        "parameters": (
            TensorMapParameter(
                "x_map", "x", 0, dims=("K", "M"), strides=(("mul", 2, "x.stride0"),), box=(64, 64), swizzle="128B",
                l2_promotion="128B",
            ),
            TensorMapParameter(
                "w_map", "w", 128, dims=("K", ("mul", 2, "I"), "E"),
                strides=(("mul", 2, "w.stride1"), ("mul", 2, "w.stride0")), box=(64, 160, 1), swizzle="128B",
                address=("add", "w.address", ("mul", 2, "K")),
            ),
            PointerParameter("offsets_pointer", "offsets", 256),
            PointerParameter("y_pointer", "y", 264),
            IntegerParameter("y_pitch", "i64", "y.stride0", 272),
            IntegerParameter("rows", "i32", "M", 280),
            FloatParameter("limit", "act_limit", 284),
            FloatParameter("alpha", "act_alpha", 288),
        ),
        "grid": (("mul", 2, ("max", 1, ("sub", ("floordiv", "sm_count", 2), "cluster_margin"))), 1, 1),
        "block": (384, 1, 1),
        "cluster": (2, 1, 1),
        "dynamic_shared": 200_000,
        "skip_if_zero": ("M",),
    }  # fmt: skip
    return LaunchRecord(**(parts | changes))


@dataclass(frozen=True)
class Torchlike:
    """A tensor as PyTorch shows one, at any address."""

    shape: tuple[int, ...]
    dtype: Any = "torch.bfloat16"
    address: int = 0x10_0000
    strides: tuple[int, ...] | None = None
    device: Any = 0

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return compact_strides(self.shape) if self.strides is None else self.strides


def tensors(m: int = 96, k: int = 128, e: int = 4, i: int = 160) -> dict[str, Any]:
    """Arguments that fit `record`."""
    return {
        "x": Torchlike((m, k), address=0x1000_0000),
        "w": Torchlike((e, 2 * i, k), address=0x2000_0000),
        "offsets": Torchlike((e,), "torch.int32", address=0x3000_0004),
        "y": Torchlike((m, i), address=0x4000_0000),
        "act_alpha": 1.5,
    }


def fake_for(launch_record: LaunchRecord, **changes: Any) -> FakeDriver:
    return FakeDriver([(parameter.offset, parameter.size) for parameter in launch_record.parameters], **changes)


def load(
    launch_record: LaunchRecord | None = None, fake: FakeDriver | None = None, **defaults: Any
) -> tuple[Kernel, FakeDriver]:
    """A kernel of `made` on a fake driver."""
    launch_record = record() if launch_record is None else launch_record
    fake = fake_for(launch_record) if fake is None else fake
    devices = Devices(Driver(fake))
    return Kernel(devices, "sample/fc1@128x160-c2x1", launch_record, CUBIN, defaults, 0), fake


def publish(
    root: Path, name: str = "sample/fc1@128x160-c2x1", launch_record: LaunchRecord | None = None, cubin: bytes = CUBIN,
    **spec: Any,
) -> Store:  # fmt: skip
    """A store at `root` that holds `launch_record` under `name`."""
    launch_record = record() if launch_record is None else launch_record
    store = Store.open(Config(store=root))
    fields = {"arch": launch_record.arch, "spec": name} | ({} if cubin == CUBIN else {"cubin": str(hash(cubin))})
    entry = Entry(
        key=key_of(fields),
        fields=fields,
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        cubin_bytes=len(cubin),
        launch=launch_record.to_json(),
        resources={} if cubin == CUBIN else {"cubin_format": cubin[8]},
        proof={},
        toolchain={},
        seconds=1.0,
    )
    store.publish(entry, cubin)
    store.publish_name(
        NameRecord(name, launch_record.arch, entry.key, SPEC | spec, {"act_alpha": 1.0, "cluster_margin": 0})
    )
    return store


def library(store: Store, launch_record: LaunchRecord | None = None, **changes: Any) -> tuple[Library, FakeDriver]:
    fake = fake_for(record() if launch_record is None else launch_record, **changes)
    return Library(store, Driver(fake)), fake
