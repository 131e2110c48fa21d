"""A kernel whose trace leaves what `leaves` says on its object, for the tests of effects."""

import enum
import weakref

import cutlass
from cutlass import cute


class Choice(enum.Enum):
    ONE = 1


class Params:
    """As schedulers have: plain values beside those of the DSL."""

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.table = {"tiles": [1, 2], 3: (4, None)}


class Counted:
    def __del__(self):
        pass


class Made:
    def __new__(cls):
        return super().__new__(cls)


class Slots:
    __slots__ = ("slot",)


class Number(int):
    pass


THING, LIST, WEAK = Params(1, 2), [1], []


def plain(self):
    self.stages, self.name, self.ratio, self.tile = 4, "mma", 0.5, (128, (64, [True, None]))
    self.dtype, self.one, self.kind = cutlass.BFloat16, Choice.ONE, Params
    return 1


def layouts(self):
    self.layout = cute.make_layout((8, 4))
    self.both = (1, self.layout)
    return 1


def params(self):
    self.params = Params(cutlass.Int32(8), 7)
    return 1


def changed(self):
    self.state = [*self.state, 2]
    return 1


def asks(self):
    """Another trace of the same object finds what the first one has left."""
    again = getattr(self, "layout", None) is not None
    self.layout = cute.make_layout((8, 4))
    return 2 if again else 1


def elsewhere(self):
    self.thing = THING
    return 1


def a_list_elsewhere(self):
    self.list = LIST
    return 1


def two_places(self):
    self.first = self.second = Params(1, 2)
    return 1


def itself(self):
    self.me = self
    return 1


def finalised(self):
    self.counted = Counted()
    return 1


def constructed(self):
    self.constructed = Made()
    return 1


def slots(self):
    self.slots = Slots()
    return 1


def number(self):
    self.number = Number(1)
    return 1


def local(self):
    class Local:
        pass

    self.local = Local()
    return 1


def function(self):
    self.function = lambda: 1
    return 1


def watched(self):
    self.watched = Params(1, 2)
    self.watch = weakref.ref(self.watched)
    return 1


def removed(self):
    del self.state
    return 1


def in_place(self):
    self.state.append(2)
    return 1


leaves = plain


@cute.kernel
def device(x: cute.Tensor, number: cutlass.Constexpr):
    x[0] = cutlass.Int32(number)


class Kernel:
    def __init__(self):
        self.state = [1]

    @cute.jit
    def __call__(self, x: cute.Tensor):
        device(x, leaves(self)).launch(grid=(1, 1, 1), block=(32, 1, 1))


def compiled(kernel):
    return cute.compile(kernel, cute.runtime.make_fake_compact_tensor(cutlass.Int32, (32,), assumed_align=16))


def compile_leaver():
    kernel = Kernel()
    compiled(kernel)
    return kernel
