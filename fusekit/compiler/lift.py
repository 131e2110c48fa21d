"""Compile-time integers that become variables of a launch record.

A kernel is compiled with two values, far apart. Its cubin must not depend on them, and its records must differ in
nothing but integers of expressions, each the value itself, a multiple of it, it and a constant, or it rounded down to a
multiple of the size of a cluster. The record then has the variable instead. No other power, quotient or limit of
the value has that form at both.
"""

from __future__ import annotations

import re
from typing import Any

from fusekit.abi import Expr, LaunchRecord, RecordError, render
from fusekit.abi.expr import thaw
from fusekit.errors import BuildError

LIFT_VALUES = (59, 106)
"""What is compiled. No small number divides both, or their difference, which is a prime: rounded to a multiple, the two
change by different amounts.
"""
_CLUSTERS = range(2, 17)  # blocks in one
_NUMBER = re.compile(r"\d+")


def unify(records: tuple[LaunchRecord, LaunchRecord], values: tuple[int, int], expr: Expr) -> LaunchRecord:
    """The record that is `records[i]` where `expr` is `values[i]`. Raises BuildError where there is none."""
    first, second = (record.to_json() for record in records)
    document = _Unifying(values, expr).whole(first, second, "record")
    if first == second:
        raise BuildError(f"lift: the launch does not depend on the lifted argument; leave lift out, or {render(expr)}")
    # An expression in a place of schema 1 may read a variable of schema 2.
    document["schema"] = 2
    try:
        return LaunchRecord.from_json(LaunchRecord.from_json(document).to_json())
    except RecordError as error:
        raise BuildError(f"lift: no launch record depends on it as this one would: {error}") from error


class _Unifying:
    def __init__(self, values: tuple[int, int], expr: Expr) -> None:
        self._values, self._expr = values, thaw(expr)

    def whole(self, a: Any, b: Any, where: str) -> Any:
        if a == b:
            return a
        if type(a) is int and type(b) is int:
            return self._number(a, b, where)
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {key: self.whole(a[key], b[key], f"{where}.{key}") for key in a}
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return [self.whole(x, y, f"{where}[{index}]") for index, (x, y) in enumerate(zip(a, b, strict=True))]
        if where.endswith(".message") and _NUMBER.sub("#", a) == _NUMBER.sub("#", b):
            numbers = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
            expressions = iter([render(self.whole(int(x), int(y), where)) for x, y in numbers])
            return _NUMBER.sub(lambda _: next(expressions), a)
        raise BuildError(f"lift: {where} has another form for another value: {str(a)[:80]} and {str(b)[:80]}")

    def _number(self, a: int, b: int, where: str) -> Any:
        first, second = self._values
        if a - first == b - second:
            return self._expr if a == first else ["add", self._expr, a - first]
        if a % first == 0 and a // first * second == b:
            return ["mul", a // first, self._expr]
        steps = [step for step in _CLUSTERS if (a, b) == (first // step * step, second // step * step)]
        if len(steps) == 1:
            return ["mul", steps[0], ["floordiv", self._expr, steps[0]]]
        raise BuildError(
            f"lift: {where} is {a} and {b} for {first} and {second}, which is no multiple of it, nor it and a constant,"
            " nor it rounded down to whole clusters"
        )
