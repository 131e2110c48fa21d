"""Entries and names for tests: the store does not know what a kernel is."""

import json
from pathlib import Path
from typing import Any

from fusekit.store import Entry, NameRecord, key_fields, key_of
from fusekit.store.documents import seal
from fusekit.store.keys import sha256
from fusekit.store.layout import MARKER
from tests.cubins import cubin_of


def build_launch(dynamic_shared: int) -> dict[str, Any]:
    """A launch record of a kernel without arguments."""
    return {
        "schema": 1, "arch": "sm_90a", "symbol": "kernel", "arguments": [], "dims": [], "constraints": [],
        "parameters": [], "grid": [1, 1, 1], "block": [32, 1, 1], "cluster": [1, 1, 1], "attributes": {},
        "dynamic_shared": dynamic_shared, "workspace": {"bytes": 0, "zeroed": False}, "skip_if_zero": [],
    }  # fmt: skip


def build_entry(seed: int = 0, cubin: bytes | None = None, seconds: float = 1.5) -> tuple[Entry, bytes]:
    cubin = cubin if cubin is not None else cubin_of("kernel", seed=f"cubin {seed}" * 20)
    fields = key_fields(
        device_spec={"op": "dense-gemm", "tile": [128, 160], "seed": seed},
        arch="sm_90a",
        toolchain={"nvidia-cutlass-dsl": "4.8.1"},
        options="--gpu-arch=sm_90a",
        sources={"kernels/gemm.py": sha256(b"source")},
    )
    entry = Entry(
        key=key_of(fields),
        fields=fields,
        cubin_sha256=sha256(cubin),
        cubin_bytes=len(cubin),
        launch=build_launch(1024 + seed),
        resources={"registers": 168, "spill_bytes": 0},
        proof={"launches": 8},
        toolchain={"nvidia-cutlass-dsl": "4.8.1"},
        seconds=seconds,
    )
    return entry, cubin


def build_record(entry: Entry, name: str = "quickstart/fc1@128x160-c2x1", arch: str = "sm_90a") -> NameRecord:
    return NameRecord(name, arch, entry.key, {"kernel": "fc1"}, {"act_limit": float("inf"), "cluster_margin": 0})


def files(root):
    """What a store under `root` holds: path -> bytes, without its marker and what only saves work."""
    return {
        path.relative_to(root): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "used", MARKER)
    }


def replant(path, change):
    """Change a document and seal it again, as somebody would who knows the format."""
    document = json.loads(path.read_bytes())
    del document["digest"]
    change(document)
    path.chmod(0o644)
    path.write_bytes(seal(document, "test"))


def cut(path):
    """Damage a file: its last bytes are gone."""
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-3])
