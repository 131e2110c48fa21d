"""A kernel that reads what it compiles from everywhere, for the tests of what a trace depends on."""

import dataclasses
import enum
import functools
import math
import os
import sys

import cutlass
import numpy as np
from cutlass import cute

from tests.cute import reader_values as values

GLOBAL = 1
TABLE = {"a": 1}
LIST = [1, 2]
ARRAY = np.array([1, 2, 3])
ENVIRONMENT = os.environ
NAME = "COMPUTED"
DATA = None
PART = functools.partial(pow, 2)


class Meta(type):
    extra = 1


class Base(metaclass=Meta):
    inherited = 1

    def method(self):
        return 1


class Sub(Base):
    pass


class Descriptor:
    def __init__(self, number):
        self.number = number

    def __get__(self, owner, kind=None):
        return self.number


class Holder:
    described = Descriptor(1)
    __slots__ = ("slot",)

    @property
    def computed(self):
        return self.slot + 1


HOLDER = Holder()
HOLDER.slot = 1


class Choice(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Options:
    bias: int = 1
    more: list = dataclasses.field(default_factory=lambda: [1])


@functools.lru_cache
def memoised(number):
    return number + values.BEHIND_CACHE


def with_default(number=1, *, named=1, kept=[1]):  # noqa: B006
    return number + named + kept[0]


def closure(cell):
    return lambda: cell[0]


CLOSURE = closure([1])
with_default.mark = 1


def reads():
    path = DATA
    text = open(path).read() if path else "1"  # noqa: PTH123, SIM115
    numbers = (
        GLOBAL, TABLE["a"], LIST[0], int(ARRAY[1]), int(ENVIRONMENT.get("READER_ALIAS", "1")), getattr(values, NAME),
        int(text), PART(3), Sub.extra, Sub.inherited, Sub().method(), Holder.described,
        HOLDER.computed, Choice.ONE.value, Options().bias, Options().more[0], memoised(1), with_default(), CLOSURE(),
        with_default.mark, max(1, 2), values.lazy, values.nested.NUMBER, 1 if hasattr(values, "OPTIONAL") else 2,
        int(os.getenv("READER_DIRECT", "1")), "--fast" in sys.argv, math.prod((1, 2)),
    )  # fmt: skip
    return functools.reduce(lambda total, number: total * 31 + number, numbers) % 1_000_003


@cute.kernel
def device(x: cute.Tensor, number: cutlass.Constexpr):
    x[0] = cutlass.Int32(number)


@cute.jit
def host(x: cute.Tensor):
    device(x, reads()).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def structured(x: cute.Tensor):
    """The DSL puts functions for the branches into the body of the class."""

    class Shape:
        number = 1 if LIST else 2

    device(x, Shape.number).launch(grid=(1, 1, 1), block=(32, 1, 1))


def compile_reader(size=32, options="", function=host):
    x = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=16)
    return cute.compile(function, x, options=options)
