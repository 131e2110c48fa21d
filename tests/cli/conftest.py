"""The command line as a process, over a store of test entries."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusekit.store import NameRecord, Store
from tests.cli import standin
from tests.runtime.fake import FakeDriver
from tests.servers import SETTINGS, Commands
from tests.store.samples import build_entry

NAMES = ("quickstart/linear@128x128-c2x1", "quickstart/moe-fc1@128x128-c2x1", "quickstart/moe-fc1@128x192-c2x1")
SPEC = {
    "op": "grouped-gemm",
    "tile": [128, 128],
    "cluster": [2, 1],
    "problem": {"E": 4, "M": 512, "N": 384, "K": 256},
}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Fusekit:
    """Runs `fusekit ...` with one writable store and no other setting of the user's."""

    def __init__(self, root: Path, commands: Commands) -> None:
        self.root = root
        self._commands = commands
        self.environment = SETTINGS | {"FUSEKIT_STORE": str(root), "HOME": str(root.parent)}
        # Shared with other tests: a build reads every file of the DSL once.
        self.environment |= {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}

    def __call__(self, *arguments: str, code: int | None = 0, stdin: str = "", **environment: str) -> Result:
        result = Result(*self._commands.run(arguments, self.environment | environment, self.root.parent, stdin, 120))
        assert code is None or result.code == code, result
        return result


@pytest.fixture
def fusekit(tmp_path: Path, commands: Commands) -> Fusekit:
    """The command line over a store that does not exist yet."""
    return Fusekit(tmp_path / "store", commands)


@pytest.fixture
def store(fusekit: Fusekit) -> Store:
    """The store of `fusekit`, with three kernels."""
    store = Store(fusekit.root)
    for seed, name in enumerate(NAMES):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        tile = [int(number) for number in name.partition("@")[2].partition("-")[0].split("x")]
        store.publish_name(NameRecord(name, "sm_90a", entry.key, SPEC | {"tile": tile}, {"act_limit": float("inf")}))
    return store


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., FakeDriver]]:
    """As `standin.installer` says."""
    return standin.installer(tmp_path, monkeypatch)


@pytest.fixture
def machine(install: Callable[..., Callable[..., FakeDriver]]) -> Callable[..., FakeDriver]:
    """As `standin.machine_of` says."""
    return standin.machine_of(install)


@pytest.fixture(params=["whole", "sampled"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel gave is compared whole, or a sample of it."""
    if request.param == "sampled":
        for name, value in (("WHOLE", 0), ("WHOLE_ELEMENTS", 0), ("SAMPLED_ROWS", 24)):
            monkeypatch.setattr(f"fusekit.bench.compare.{name}", value)
