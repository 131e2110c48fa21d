"""A store with one foreign kernel of two launches, over a driver that records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import (
    Dim,
    FloatParameter,
    LaunchRecord,
    LaunchStep,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
)
from fusekit.config import Config
from fusekit.spec import parse_text
from fusekit.store import Entry, NameRecord, Store, key_of
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import CUBIN

NAME = "made/two@base"
SPEC = """
schema = 1
summary = "made for the test"
[[kernel]]
name = "two"
op = "extern"
arch = "sm_90a"
source = "made:two"
"""


def record(**changes: Any) -> LaunchRecord:
    """x [M, K], by columns index [K] and fp8 [M, K], into y [M]: the second launch reads what the first one left."""
    parts: dict[str, Any] = {
        "arch": "sm_90a",
        "symbol": "kernel",
        "arguments": (
            TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), 8),
            TensorArgument("fp8", "input", "e4m3", ("M", "K"), (1, "fp8.stride1"), 16),
            TensorArgument("index", "input", "i32", ("K",), (1,), alignment=4),
            TensorArgument("y", "output", "f32", ("M",), (1,), alignment=4),
            ScalarArgument("scale", "f32"),
        ),
        "dims": (Dim("M", 1, 1), Dim("K", 8, 8, 4096)),
        "parameters": (
            PointerParameter("x_pointer", "x", 0), PointerParameter("memory", "scratch", 8),
            PointerParameter("fp8_pointer", "fp8", 16), PointerParameter("index_pointer", "index", 24),
            FloatParameter("factor", "scale", 32),
        ),
        "grid": ("M", 1, 1), "block": (128, 1, 1), "scratch": ("mul", 4, "M"),
        "then": (
            LaunchStep(
                (PointerParameter("memory", "scratch", 0), PointerParameter("y_pointer", "y", 8)), (1, 1, 1),
                (256, 1, 1), symbol="second",
            ),
        ),
    }  # fmt: skip
    return LaunchRecord(**(parts | changes))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, launch_record: LaunchRecord | None = None) -> FakeDriver:
    """Publishes the kernel NAME below `folder`, the store of the environment from here on; gives the driver."""
    launch_record = record() if launch_record is None else launch_record
    (spec,) = parse_text(SPEC, "made", "made.toml")
    fields = {"arch": "sm_90a"}
    entry = Entry(
        key_of(fields), fields, hashlib.sha256(CUBIN).hexdigest(), len(CUBIN), launch_record.to_json(), {}, {}, {}, 1.0
    )
    store = Store.open(Config(store=folder))
    store.publish(entry, CUBIN)
    store.publish_name(NameRecord(NAME, "sm_90a", entry.key, json.loads(json.dumps(spec.canonical())), {}))
    first, *rest = launch_record.launches
    fake = FakeDriver(
        [(each.offset, each.size) for each in first.parameters], symbol=first.symbol,
        others={step.symbol: [(each.offset, each.size) for each in step.parameters] for step in rest},
    )  # fmt: skip
    monkeypatch.setenv("FUSEKIT_STORE", str(folder))
    monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: fake)
    return fake
