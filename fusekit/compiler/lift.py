"""Compile-time integers that become variables of a launch record.

A kernel is compiled with several values. Its cubin must not depend on them, and its records must differ in nothing but
integers of expressions, each an affine function of the value. The record then says the variable in their place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fusekit.abi import Expr, LaunchRecord, RecordError, render
from fusekit.abi.expr import thaw
from fusekit.errors import BuildError

_NUMBER = re.compile(r"\d+")


def unify(records: Sequence[LaunchRecord], values: Sequence[int], expr: Expr) -> LaunchRecord:
    """The record that is `records[i]` where `expr` is `values[i]`. Raises BuildError where there is none."""
    found = _Unifying(values, expr)
    made = found.whole([record.to_json() for record in records], "record")
    if not found.used:
        raise BuildError(f"lift: the launch does not depend on the lifted argument; leave lift out, or {render(expr)}")
    # An expression in a place of schema 1 may read a variable of schema 2.
    made["schema"] = 2
    try:
        record = LaunchRecord.from_json(made)
        return LaunchRecord.from_json(record.to_json())
    except RecordError as error:
        raise BuildError(f"lift: no launch record depends on it as this one would: {error}") from error


class _Unifying:
    def __init__(self, values: Sequence[int], expr: Expr) -> None:
        self._values, self._expr = values, thaw(expr)
        self.used = False

    def whole(self, parts: list[Any], where: str) -> Any:
        first = parts[0]
        if all(part == first for part in parts):
            return first
        if all(type(part) is int for part in parts):
            return self._affine(parts, where)
        if all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
            return {key: self.whole([part[key] for part in parts], f"{where}.{key}") for key in first}
        if all(isinstance(part, list) and len(part) == len(first) for part in parts):
            return [
                self.whole(list(items), f"{where}[{index}]") for index, items in enumerate(zip(*parts, strict=True))
            ]
        if where.endswith(".message") and len({_NUMBER.sub("#", part) for part in parts}) == 1:
            numbers = zip(*(map(int, _NUMBER.findall(part)) for part in parts), strict=True)
            said = iter([render(self.whole(list(each), where)) for each in numbers])
            return _NUMBER.sub(lambda _: next(said), first)
        raise BuildError(f"lift: {where} has another form for another value: {' and '.join(map(_short, parts[:2]))}")

    def _affine(self, numbers: list[int], where: str) -> Any:
        slope, rest = divmod(numbers[1] - numbers[0], self._values[1] - self._values[0])
        constant = numbers[0] - slope * self._values[0]
        if rest or any(slope * value + constant != each for value, each in zip(self._values, numbers, strict=True)):
            raise BuildError(
                f"lift: {where} is {', '.join(map(str, numbers))} for {', '.join(map(str, self._values))}, which is no"
                " multiple of it and a constant"
            )
        self.used = True
        expr = self._expr if slope == 1 else ["mul", slope, self._expr]
        return expr if constant == 0 else ["add", expr, constant]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
