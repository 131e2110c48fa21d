"""Owners of files: a process, named so that others can see whether it is gone.

An owner is `<host>-<pid>`. The host part identifies one boot of one machine and one PID namespace (containers have
their own), so only processes that would see the owner decide that it is gone. All others go by age.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

_OWNER = re.compile(r"([0-9a-f]{12})-([0-9]{1,10})")


def host() -> str:
    """This boot and PID namespace as 12 hexadecimal digits; zeros if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path: "pid:[4026531836]"
    except OSError:
        return "0" * 12
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:12]


def owner(host: str) -> str:
    """The owner for this process, on `host`. Not cached: a fork has another PID."""
    return f"{host}-{os.getpid()}"


def is_gone(text: str, host: str) -> bool:
    """Whether the owner in `text` was a process of this `host` that has ended; False if that cannot be determined.

    A PID that was reused counts as the old process: the answer may be False for too long, never True too early.
    """
    match = _OWNER.search(text)
    if match is None or match[1] != host or host == "0" * 12:
        return False
    with contextlib.suppress(PermissionError):  # a process of another user exists, too
        try:
            os.kill(int(match[2]), 0)
        except (ProcessLookupError, OverflowError):
            return True
    return False
