"""Objects of this process and its driver: they cannot be pickled, and a copy would free the same memory twice."""

from __future__ import annotations

from typing import Any

from fusekit.errors import UsageError


class Handle:
    """Base of objects that hold memory or code of the driver. Copying and pickling raise UsageError."""

    __slots__ = ()
    again = "make another one"

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self!r} cannot be copied or pickled: it belongs to this process and its GPU; {type(self).again}"
        )


class SharedHandle(Handle):
    """A handle whose copy, also a deep one, is itself."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self
