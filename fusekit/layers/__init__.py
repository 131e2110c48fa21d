"""Whole layers from a store: their buffers, and the launches of their passes.

    layer = library.layer("gpt-oss-120b/moe")
    sizes = layer.sizes(tokens=24576)
    forward = layer.bind_forward(x=x, router=wr, w1=w1, w2=w2, y=y, kept=kept, scratch=scratch)
    forward(stream)

No framework is imported. Memory is the caller's, tensors and streams are taken by protocol, and no count of rows is
copied to the host. A pass may be captured in a CUDA graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import ArgumentError, DriverError, NotBuiltError, UsageError, how_to_build, some
from fusekit.layers.layer import Layer
from fusekit.layers.options import LayerOptions
from fusekit.layers.passes import Pass, Sizes
from fusekit.store.names import layer_of, layer_record

if TYPE_CHECKING:
    from fusekit.layers.ranked import RankedLayer
    from fusekit.library import Library
    from fusekit.store import Store

__all__ = ["Layer", "LayerOptions", "Pass", "Sizes", "layers_of", "open_layer", "record_of"]

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def open_layer(library: Library, name: str, arch: str | None, device: int | None, **over: Any) -> Layer | RankedLayer:
    """The layer `name`. over: ranks, tokens and rows of a layer over ranks; None where they are not given."""
    record = record_of(library.store, name, arch, lambda archs: _of_device(library, archs, device))
    if record.windows:
        from fusekit.layers.ranked import RankedLayer

        return RankedLayer(library, record, device, **over)
    if record.devices:
        with suppress(DriverError):  # without a device: as for any
            target = library.devices.get(library.devices.current() if device is None else device)
            record = record.for_device(target.name)
    for key, value in over.items():
        if value is not None:
            raise ArgumentError(
                f"{name} is a layer of one GPU, which takes no {key}; set ranks = R in its table, and build it again",
                argument=key,
            )
    return Layer(library, record, device)


def layers_of(store: Store) -> dict[str, LayerOptions]:
    """The options of every layer in a store by name."""
    listing = store.listing("*/*.layer", layers=True)
    records = [listed.record for listed in listing.names]
    return {
        layer: LayerOptions(record.spec.get("options", {}))
        for record in records
        if (layer := layer_of(record.name)) is not None
    }


def record_of(
    store: Store, name: str, arch: str | None = None, of_device: Callable[[list[str]], str] = min
) -> LayerRecord:  # fmt: skip
    """The record of the layer `name`. of_device: chooses among several architectures where `arch` is None. Raises
    NotBuiltError if there is none, UsageError for a kernel and for a name that no layer can have, IntegrityError for a
    damaged one.
    """
    from fusekit.runtime import wellformed

    if not _NAME.fullmatch(name):
        there = [*layers_of(store)]
        stored = f"the store has {some(there)}" if there else "the store has none yet"
        raise UsageError(f"'{name}' names no layer; a layer is named file/layer, such as 'model/moe'; {stored}")
    archs = [known for _, known in store.recorded(layer_record(name))]
    if not archs:
        raise _missing(store, name, arch)
    if arch is None:
        arch = archs[0] if len(archs) == 1 else of_device(archs)
    elif arch not in archs:
        raise store.not_built(name, arch, f"only for {', '.join(archs)}")
    found = store.find_name(layer_record(name), arch)
    stored_entry = None if found is None else store.load(found.key)
    if found is None or stored_entry is None:
        raise store.not_built(name, arch)
    return wellformed.layer_record(*stored_entry)


def _of_device(library: Library, archs: list[str], device: int | None) -> str:
    """The architecture of the device, among several; without a device the first."""
    from fusekit.runtime.devices import archs_of

    try:
        target = library.devices.get(library.devices.current() if device is None else device)
    except DriverError:
        return archs[0]
    return next((arch for arch in archs_of(target.capability) if arch in archs), archs[0])


def _missing(store: Store, name: str, arch: str | None) -> Exception:
    kernels = [listed.record for listed in store.names(name)]
    if not kernels:
        return store.not_built(name, arch)
    if not kernels[0].name.startswith(f"{name}."):
        return UsageError(
            f"'{name}' is a kernel, and not a layer of a model: library.load('{name}') loads it; it is stored as "
            f"{', '.join(sorted(record.name for record in kernels))}"
        )
    _, remedy = how_to_build(name, arch or kernels[0].arch)
    return NotBuiltError(
        f"the store has {len(kernels)} kernels of {name} and no record of the layer: some of its kernels are missing,"
        f" or an earlier fusekit built them; a build makes it, and compiles only kernels that are missing; {remedy}",
        name=name,
    )
