"""What stands for a value of the DSL that a trace would have left on an argument."""

from __future__ import annotations

from typing import NoReturn

from fusekit.errors import FusekitError


class LeftOut:
    """In the place of a value that belongs to a trace, as an operation of its IR does: nothing can be done with it
    when the trace has ended. It is there, so code that asks whether it is finds it. To read it is an error.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and the DSL look for
            raise AttributeError(name)
        raise FusekitError(
            f"{self._place}.{name} is read, of a trace that fusekit left out; fusekit exec --level 2 traces each time"
        )

    def __repr__(self) -> str:
        return f"<{self._place} of a trace that fusekit left out>"
