"""Arrays of frameworks without bfloat16, such as Numba's or NumPy's, seen as bf16: the same memory, another dtype."""

from __future__ import annotations

from typing import Any

from fusekit.dtypes import DTYPES, by
from fusekit.errors import ArgumentError

_TYPESTRS = {name: f"<{typestr}" for typestr, name in by("typestr").items()}


class View:
    """`array` as elements of another type, by the array interface of CUDA or of NumPy; keeps the array alive."""

    def __init__(self, array: Any, dtype: str) -> None:
        interface = "__cuda_array_interface__" if hasattr(array, "__cuda_array_interface__") else "__array_interface__"
        shown = dict(getattr(array, interface))
        if dtype not in _TYPESTRS:
            raise ArgumentError(f"dtype {dtype!r}; known here are {', '.join(_TYPESTRS)}")
        if int(shown["typestr"][2:]) != DTYPES[dtype].bytes:
            raise ArgumentError(f"elements of {shown['typestr']} cannot be seen as {dtype}; the sizes differ")
        shown["typestr"] = _TYPESTRS[dtype]
        shown.pop("descr", None)
        self.array = array
        setattr(self, interface, shown)


def as_dtype(array: Any, dtype: str) -> View:
    """`array`, of NumPy or a framework that shows ``__cuda_array_interface__``, with its elements read as `dtype`."""
    return View(array, dtype)
