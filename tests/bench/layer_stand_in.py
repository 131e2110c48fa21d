"""A layer whose kernels are their formulas, on the memory of a stand-in GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusekit.bench.layer_trial import parts_of
from fusekit.compiler.layers import Layer as Described
from fusekit.compiler.layers import publish_layer
from fusekit.layers import Layer, record_of
from fusekit.plan.layer import Options, program
from fusekit.store import NameRecord, Store
from tests.bench.rig import Rig
from tests.layers.host import compute
from tests.store.samples import build_entry

MS = 0.5  # of every launch


def publish(root: Path, options: Options) -> str:
    """The names of a layer's kernels in the store at `root`, standing for kernels that cannot be launched; its name."""
    store, name = Store(root), f"{options.file}/{options.name}"
    for seed, (part, keys) in enumerate(program(options).parts.items()):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        spec = {"op": keys["op"], "layer": {"name": name, "topk": options.topk}}
        store.publish_name(NameRecord(f"{name}.{part}@one", "sm_90a", entry.key, spec, {}))
    assert publish_layer(store, Described(options, "sm_90a", ()))
    return name


class Formula:
    """A kernel. wrong: changes what it made, by the names of its outputs."""

    def __init__(self, rig: Rig, keys: Any, part: str, dims: Any, wrong: Any) -> None:
        self.rig, self.keys, self.part, self.dims, self.wrong = rig, keys, part, dims, wrong

    def bind(self, **tensors: Any) -> Any:
        def launch(stream: int) -> None:
            self.rig._spend(MS)
            if self.rig._capture is None and not self.rig.timed:
                self._compute(tensors)

        return launch

    def _compute(self, tensors: Any) -> None:
        compute(self.keys, tensors, self.dims, lambda outputs: self.wrong(self.part, outputs))


class StandIn(Layer):
    """The layer `name` of a store that `publish` filled."""

    _compiles = False

    def __init__(self, rig: Rig, wrong: Any, *given: Any) -> None:
        super().__init__(*given)
        self._parts = parts_of(self)
        self._rig, self._wrong = rig, wrong

    def _kernel(self, part: str, dims: Any) -> Any:
        return Formula(self._rig, self._parts[part], part, dims, self._wrong)


def install(monkeypatch: Any, rig: Rig, wrong: Any = lambda part, outputs: None) -> None:
    """Layers of every library are stand-ins from now on."""
    monkeypatch.setattr(
        "fusekit.library.Library.layer",
        lambda library, name, arch=None, device=None: StandIn(
            rig, wrong, library, record_of(library.store, name, arch)
        ),
    )
