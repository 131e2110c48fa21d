"""Which cases of a test run only with --soak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

LONG = pytest.mark.soak("one more case of what others show")


def sample(cases: Iterable[Any], *always: Any, most: int = 3) -> list[Any]:
    """`cases` as parameters of a test. Those in `always` run in every run, without any `most` of them, evenly from the
    first to the last; the others run with --soak.
    """
    values = list(cases)
    assert all(each in values for each in always), always
    chosen = [values.index(each) for each in always] or _evenly(values, most)
    return [
        pytest.param(*_arguments(each), marks=() if number in chosen else LONG) for number, each in enumerate(values)
    ]


def _evenly(values: Sequence[Any], most: int) -> set[int]:
    steps = max(most - 1, 1)
    return {round(number * (len(values) - 1) / steps) for number in range(most)}


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
