"""What arrays, and types of their elements, are compared by."""

from __future__ import annotations

import hashlib
from typing import Any

from fusekit.cute.digest import UnnamedError

_LARGEST_ARRAY = 1 << 20  # bytes


def array(kind: type, value: Any) -> tuple[Any, ...]:
    """What an object of PyTorch or NumPy is compared by, in plain values. Raises UnnamedError."""
    module, name = kind.__module__, kind.__qualname__
    if name in ("dtype", "device", "Size", "layout", "memory_format") or name.endswith("DType"):
        return (module, name, repr(value))
    if name == "FakeTensor" or (name in ("Tensor", "Parameter") and value.device.type == "meta"):
        return (
            "fake", str(value.dtype), tuple(map(int, value.shape)), tuple(map(int, value.stride())),
            str(value.device), name, value.requires_grad, int(value.storage_offset()),
        )  # fmt: skip
    if module == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        if value.nbytes > _LARGEST_ARRAY:
            raise UnnamedError(f"an array of {value.nbytes} bytes is too large for a key")
        return (
            "array", name, repr((value.dtype, value.dtype.metadata)), value.shape, value.strides,
            value.flags.num, hashlib.sha256(value.tobytes()).digest(),
        )  # fmt: skip
    raise UnnamedError(f"{module}.{name} has no name for a key")
