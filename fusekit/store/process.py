"""Whose file it is: a process, named so that others can tell whether it is gone.

An owner is `<host>-<pid>`. The host part stands for one boot of one machine and one set of process numbers
(containers have their own), so a process is called gone only by those who would see it if it were there. Everybody
else has to go by age.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

_OWNER = re.compile(r"([0-9a-f]{12})-([0-9]{1,10})")


def host() -> str:
    """This boot and process number space, as 12 hexadecimal digits; zeros where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path: "pid:[4026531836]"
    except OSError:
        return "0" * 12
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:12]


def owner(host: str) -> str:
    """This process, on `host`. Asked anew each time: a fork has another number."""
    return f"{host}-{os.getpid()}"


def is_gone(text: str, host: str) -> bool:
    """Whether the owner in `text` was a process of this `host` that has ended; False where that cannot be told.

    A number that was given to a new process counts as the old one's: the answer may be False for too long, never True
    too soon.
    """
    found = _OWNER.search(text)
    if found is None or found[1] != host or host == "0" * 12:
        return False
    with contextlib.suppress(PermissionError):  # somebody else's process is a process
        try:
            os.kill(int(found[2]), 0)
        except (ProcessLookupError, OverflowError):
            return True
    return False
