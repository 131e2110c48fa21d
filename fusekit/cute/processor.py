"""What the machine is, as far as code that was compiled for it depends on that."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple

_CPU = ("flags", "Features", "cpu family", "model", "CPU part", "CPU implementer")
_NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96


def cpu() -> str:
    """What the first processor can do, in the words of the kernel."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    rows = dict(line.partition(":")[::2] for line in first.splitlines())
    known = {name.strip(): " ".join(value.split()) for name, value in rows.items()}
    return "\n".join(f"{name}: {known[name]}" for name in _CPU if name in known)


def system() -> str:
    """The C library, and the distribution with its other libraries: a shared library needs those that it was linked
    with.
    """
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another C library
        libc = ""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    parts = (platform.system(), platform.machine(), libc, release.get("ID", ""), release.get("VERSION_ID", ""))
    return " ".join(filter(None, parts))


class Gpus(NamedTuple):
    """The NVIDIA GPUs of this machine. arch: as `sm_90`; "mixed" of several, "cpu" without any. models: sorted."""

    arch: str
    models: tuple[str, ...]


def gpus() -> Gpus:
    """As NVML tells, which starts no context on them."""
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2():
            return Gpus("cpu", ())
    except (OSError, AttributeError):
        return Gpus("cpu", ())
    try:
        found, count = set(), ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            name = ctypes.create_string_buffer(_NAME_BYTES)
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
                or nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
                or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            ):
                continue
            found.add((f"sm_{major.value}{minor.value}", name.value.decode(errors="replace")))
    finally:
        nvml.nvmlShutdown()
    archs = {arch for arch, _ in found}
    return Gpus(
        archs.pop() if len(archs) == 1 else "mixed" if archs else "cpu", tuple(sorted(name for _, name in found))
    )
