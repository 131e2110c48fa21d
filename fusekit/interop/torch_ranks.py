"""Ranks of torch.distributed: how the processes of a group find each other's windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed

from fusekit.errors import PeerTimeoutError
from fusekit.exchange import Ranks
from fusekit.exchange.ranks import milliseconds
from fusekit.interop.torch_moe import expert_parameters
from fusekit.runtime import Devices

TIMEOUT = 60_000


def ranks_of(devices: Devices, group: Any = None, *, timeout: int = TIMEOUT) -> Ranks:
    """This process's rank in `group`, on PyTorch's current device.

    All processes of the group call this together; they are of one machine. A second call returns the same ranks, until
    they are closed.

    Parameters
    ----------
    devices : Devices
        `library.devices`.
    group : torch.distributed.ProcessGroup, optional
        Default: all processes.
    timeout : int
        Milliseconds that a launch, and the allocation of windows, waits for the other ranks.

    Raises
    ------
    PeerTimeoutError
        If a process does not come in time.
    """
    timeout = milliseconds(timeout)
    key = devices, distributed.group.WORLD if group is None else group, timeout
    known = _known()
    if key not in known or known[key].closed:
        known[key] = _ranks(*key)
    return known[key]


@cache
def _known() -> dict[tuple[Devices, Any, int], Ranks]:
    """The ranks of this process."""
    return {}


def _ranks(devices: Devices, group: Any, timeout: int) -> Ranks:
    rank = distributed.get_rank(group)
    return Ranks.of_process(devices, torch.cuda.current_device(), rank, gather(group, timeout), timeout)


def gather(group: Any, timeout: int) -> Callable[[bytes], Sequence[bytes]]:
    """All-gather of bytes over the CPU, in a process group of its own with its own time limit."""
    members = distributed.get_process_group_ranks(group)

    def late(error: Exception) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"rank {distributed.get_rank(group)} waited {timeout / 1e3:g} s for the other {len(members) - 1} ranks to"
            f" make windows with it ({error}); look for what ended or held up one of them, or give a longer timeout"
        )

    try:
        over = distributed.new_group(
            members, timedelta(milliseconds=timeout), backend="gloo", use_local_synchronization=True
        )
    except RuntimeError as error:
        raise late(error) from error

    def gathered(value: bytes) -> Sequence[bytes]:
        values: list[Any] = [None] * len(members)
        try:
            distributed.all_gather_object(values, value, group=over)
        except RuntimeError as error:
            raise late(error) from error
        return values

    return gathered


def sharded_state_dict(model: Any, group: Any = None) -> dict[str, Any]:
    """`model.state_dict()` with the parameters of a rank's experts as DTensors: shards of the experts of all ranks.

    torch.distributed.checkpoint saves these as whole tensors, so one GPU can load the checkpoint, and loads each rank's
    share of such a checkpoint into the parameters. All processes of the group call this together.

    Parameters
    ----------
    model : torch.nn.Module
    group : torch.distributed.ProcessGroup, optional
        Default: all processes.
    """
    from torch.distributed.device_mesh import DeviceMesh  # seconds that no call of a layer needs
    from torch.distributed.tensor import DTensor, Shard

    state: dict[str, Any] = model.state_dict()
    experts = [name for name, _ in expert_parameters(model)]
    if experts:
        kind = state[experts[0]].device.type
        mesh = DeviceMesh.from_group(distributed.group.WORLD if group is None else group, kind)
        state |= {name: DTensor.from_local(state[name], mesh, [Shard(0)], run_check=False) for name in experts}
    return state
