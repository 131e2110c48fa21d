"""Loading cubins, binding tensors, launching. `fusekit.library` finds the kernels in a store.

Stands on the standard library, fusekit's `abi` and `store`, and cuda.bindings, which is imported at the first load.
Nothing here imports the compiler, the DSL, PyTorch or NumPy; tensors and streams of any framework are taken by
protocol.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.runtime.checked import OffsetsProblem as OffsetsProblem
    from fusekit.runtime.devices import Device as Device
    from fusekit.runtime.devices import Devices as Devices
    from fusekit.runtime.driver import Driver as Driver
    from fusekit.runtime.kernel import Kernel as Kernel
    from fusekit.runtime.launch import Launch as Launch
    from fusekit.runtime.memory import DeviceArray as DeviceArray

_HOMES = {
    "Device": "devices", "DeviceArray": "memory", "Devices": "devices", "Driver": "driver", "Kernel": "kernel",
    "Launch": "launch", "OffsetsProblem": "checked",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports on first use: a library starts the driver before it imports the rest."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"fusekit.runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fusekit.runtime' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
