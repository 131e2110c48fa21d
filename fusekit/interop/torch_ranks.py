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
from fusekit.runtime import Devices

TIMEOUT = 60_000


def ranks_of(devices: Devices, group: Any = None, *, timeout: int = TIMEOUT) -> Ranks:
    """This process's rank in `group` (default: all processes), on PyTorch's current device.

    devices: `library.devices`. timeout: milliseconds that a launch, and the making of windows, waits for the other
    ranks. All processes of the group call this together, and each gets the same ranks again, until they are
    closed; they are of one machine.
    Raises PeerTimeoutError where one does not come in time.
    """
    timeout = milliseconds(timeout)
    key = devices, distributed.group.WORLD if group is None else group, timeout
    known = _known()
    if key not in known or known[key].closed:
        known[key] = _ranks(*key)
    return known[key]


@cache
def _known() -> dict[tuple[Devices, Any, int], Ranks]:
    """Those of this process."""
    return {}


def _ranks(devices: Devices, group: Any, timeout: int) -> Ranks:
    own = distributed.get_rank(group)
    return Ranks.of_process(devices, torch.cuda.current_device(), own, gather(group, timeout), timeout)


def gather(group: Any, timeout: int) -> Callable[[bytes], Sequence[bytes]]:
    """`gather` as fusekit.exchange wants it, over the CPU: a group of its own, which has its own time limit."""
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
        found: list[Any] = [None] * len(members)
        try:
            distributed.all_gather_object(found, value, group=over)
        except RuntimeError as error:
            raise late(error) from error
        return found

    return gathered
