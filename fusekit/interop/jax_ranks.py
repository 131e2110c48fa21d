"""Ranks of a mesh of JAX: which device of an axis is which rank, and how processes find each other's windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from fusekit.errors import ArgumentError
from fusekit.exchange import Ranks
from fusekit.exchange.windows import Gather
from fusekit.layers import Layer
from fusekit.layers.ranked import RankedLayer
from fusekit.runtime import Devices

TIMEOUT = 60_000


def ranks_of(
    devices: Devices, mesh: Any, axis: str, *, timeout: int = TIMEOUT, gather: Gather | None = None
) -> list[Ranks]:
    """This process's ranks of a mesh: the device at index r of the mesh's `axis` is rank r.

    Each index along the mesh's other axes is a group of ranks of its own. A second call for the same mesh returns the
    same ranks.

    Parameters
    ----------
    devices : Devices
        `library.devices`.
    mesh : jax.sharding.Mesh
    axis : str
        The axis along which the experts are spread.
    timeout : int
        Milliseconds that a launch waits for the other ranks.
    gather : callable, optional
        All-gather of bytes, where each rank is a process of the same machine. Default: over JAX's processes.

    Raises
    ------
    ArgumentError
        If the mesh has no such axis, or some ranks share a process and others do not.
    """
    if axis not in mesh.axis_names:
        raise ArgumentError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh.axis_names)}", argument="axis")
    return _ranks(devices, mesh, axis, timeout, gather)


@cache
def _ranks(devices: Devices, mesh: Any, axis: str, timeout: int, gather: Gather | None) -> list[Ranks]:
    groups = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    process, ranks = jax.process_index(), []
    for group in groups:
        processes = [device.process_index for device in group]
        local_ranks = [
            (rank, device.local_hardware_id) for rank, device in enumerate(group) if device.process_index == process
        ]
        if len(set(processes)) == 1:
            ranks += Ranks.in_process(devices, [device for _, device in local_ranks], timeout) if local_ranks else []
        elif len(set(processes)) == len(group):
            for rank, device in local_ranks:
                ranks.append(Ranks.of_process(devices, device, rank, gather or _over(tuple(processes)), timeout))
        else:
            raise ArgumentError(
                f"the devices along {axis!r} are of processes {processes}; the ranks of a layer are all in one process,"
                " or each in a process of its own",
                argument="mesh",
            )
    return ranks


def _over(processes: tuple[int, ...]) -> Gather:
    """All-gather of bytes over these processes of JAX, which all call it together."""

    def gathered(value: bytes) -> Sequence[bytes]:
        from jax.experimental import multihost_utils

        # One byte more, since there are no arrays of 0 bytes between processes.
        values = multihost_utils.process_allgather(jnp.frombuffer(value + b"\0", jnp.uint8))
        return [bytes(values[process][:-1]) for process in processes]

    return gathered


def layers_of(
    layer: Layer, mesh: Any, axis: str | None, timeout: int, gather: Gather | None = None
) -> dict[int, RankedLayer]:
    """The layer on each of this process's ranks, by the ordinals of their devices, with windows.

    Raises ArgumentError for a layer of one GPU, and for a mesh of another number of ranks.
    """
    if not isinstance(layer, RankedLayer):
        raise ArgumentError(
            f"{layer.name} is a layer of one GPU, which takes no mesh; set ranks = R in its table, and build it again",
            argument="mesh",
        )
    if mesh is None or axis is None:
        raise ArgumentError(
            f"{layer.name} is over {layer.options.ranks} ranks; give the mesh of jax.shard_map, and the axis along"
            " which the experts are",
            argument="mesh",
        )
    ranks = ranks_of(layer.devices, mesh, axis, timeout=timeout, gather=gather)
    ranked = {each.device: layer.over(each) for each in ranks}
    for ranked_layer in ranked.values():
        ranked_layer.connect(training=layer.options.trained)
    return ranked


def devices_of(platform: str, like: int) -> list[int]:
    """The ordinals of this process's devices of the same kind as device `like`: XLA may run a call on any of them."""
    try:
        kinds = {each.local_hardware_id: each.device_kind for each in jax.local_devices(backend=platform.lower())}
    except RuntimeError:  # there is none, so nothing will be run
        return []
    return [ordinal for ordinal, kind in kinds.items() if kind == kinds.get(like)]


class Placed:
    """A layer on the devices that call it; a layer over ranks is on each device that of the device's rank."""

    def __init__(
        self, layer: Layer, mesh: Any, axis: str | None, timeout: int, gather: Any, platform: str = "CUDA"
    ) -> None:
        self.layer, self.axis, self._platform = layer, axis, platform
        self._ranked: dict[int, RankedLayer] = {}
        if layer.options.ranks > 1 or mesh is not None:
            self._ranked = layers_of(layer, mesh, axis, timeout, gather)
            self.layer = next(iter(self._ranked.values()), layer)

    def here(self) -> tuple[int, Layer]:
        """This thread's device, and the layer there. Raises ArgumentError for a device that has no rank."""
        device = self.layer.current_device()
        if self._ranked and device not in self._ranked:
            raise ArgumentError(
                f"{self.layer.name} was called on device {device}; its ranks are on devices"
                f" {', '.join(map(str, self._ranked))}; use the mesh that it was given"
            )
        return device, self._ranked.get(device, self.layer)

    def load(self, tokens: int | None = None) -> None:
        """Loads the kernels, on every device that may run them. Raises ArgumentError outside jax.shard_map, and for too
        many tokens.
        """
        if not self._ranked:
            devices = devices_of(self._platform, self.layer.current_device())
            self.layer.load(tokens, devices=devices)
            return
        ranks, capacity = self.layer.options.ranks, next(iter(self._ranked.values())).capacity
        try:
            size = jax.lax.axis_size(self.axis)
        except NameError:
            size = 0
        if size != ranks:
            there = f"it has {size} places there" if size else "there is none here"
            raise ArgumentError(
                f"{self.layer.name} is over {ranks} ranks along the axis {self.axis!r}, and {there}; call it inside"
                " jax.shard_map over the mesh that it was given"
            )
        if tokens is not None and tokens > capacity:
            raise ArgumentError(
                f"{self.layer.name}: {tokens} tokens of a rank; the windows have room for {capacity}; open the layer"
                f" with tokens = {tokens} or more",
                argument="x",
            )
        for layer in self._ranked.values():
            layer.load(tokens)

    def check(self) -> None:
        """Raises CapacityError, once, if a pass had too few rows; PeerTimeoutError if a rank did not come. Waits for
        nothing.
        """
        for layer in self._ranked.values():
            layer.check()

    def close(self, *, alone: bool = False) -> None:
        """Frees the windows when nothing uses them any more: all processes together, or alone if one is gone."""
        for layer in self._ranked.values():
            assert layer.ranks is not None
            layer.ranks.close(alone=alone)
