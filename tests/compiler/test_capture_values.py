"""The arguments of a call as data, and back: `fusekit.compiler.fakes`."""

import enum
import functools
import json
import operator
import os
import threading
from typing import NamedTuple

import numpy as np
import pytest

from fusekit.errors import BuildError

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_tensor, make_ptr

from examples.cute import rows
from fusekit.compiler import closures, fakes


class Shape(enum.Enum):
    ROUND = 1


class Config(NamedTuple):
    threads: int
    dtype: type


class Holder:
    def __init__(self, **state):
        self.__dict__.update(state)


def there_and_back(value):
    writer = fakes.CallWriter()
    data = json.loads(json.dumps(writer.value(value, "it")))
    return fakes.CallReader.of(writer.symbols).value(data)


@pytest.mark.parametrize(
    "value",
    [1, -2.5, -0.0, float("-inf"), True, "text", None, (1, (2, "a")), [1, None], {"a": 1, 2: (3,)}, Shape.ROUND,
     cutlass.BFloat16, rows.SquareSum, Config(128, cutlass.Float16), operator.add, max,
     {"deep": [Config(1, cutlass.Int8), (Shape.ROUND,)]},
    ],
    ids=str,
)  # fmt: skip
def test_values_come_back(value):
    result = there_and_back(value)
    assert result == value
    assert type(result) is type(value)


def test_objects_come_back_with_their_attributes():
    result = there_and_back(Holder(a=1, b=Holder(c=(cutlass.Float32, None))))
    assert type(result) is Holder
    assert (result.a, result.b.c) == (1, (cutlass.Float32, None))


def test_numbers_of_the_dsl_keep_their_type():
    result = there_and_back([cutlass.Float32(0.5), cutlass.Int64(7), cutlass.Boolean(True)])
    assert [(type(item), item.value) for item in result] == [
        (cutlass.Float32, 0.5), (cutlass.Int64, 7), (cutlass.Boolean, True),
    ]  # fmt: skip


def doubling():
    return lambda x: x * FACTOR


def halving():
    return lambda x, by=2: x / by


def within(factor):
    return lambda x: x * factor


FACTOR = 2
LAMBDAS = (lambda x: x + 1, lambda x: x - 1, lambda *x, y=0: x)


def test_a_lambda_comes_back_by_its_text_and_finds_the_names_of_its_module():
    for function in (doubling(), *LAMBDAS[:2]):
        result = there_and_back(function)
        assert result is not function
        assert result(5) == function(5)


def test_a_lambda_keeps_its_place_among_others_in_a_line():
    assert [there_and_back(item)(5) for item in LAMBDAS[:2]] == [6, 4]


@pytest.mark.parametrize("function", [halving(), LAMBDAS[2]])
def test_a_lambda_with_more_than_its_text_is_refused(function):
    with pytest.raises(BuildError, match=r"made inside a function|gives something else"):
        fakes.CallWriter().value(function, "it")


def test_text_that_is_no_lambda_is_not_run():
    with pytest.raises(BuildError, match="is no lambda"):
        fakes.read(f"{__name__}:facts", {"fakes": [{"lambda": "exit()", "module": __name__}]})


def recursive():
    def again(x):
        return again(x - 1) if x else 0

    return again


def early():
    def function():
        return later

    yielded = function
    if not yielded:
        later = 1
    return yielded


def named(function):
    @functools.wraps(function)
    def run(x):
        return function(x)

    return run


def replaced():
    def function():
        return 1

    return function


REPLACED = replaced()


def replaced():
    def function():
        return 2

    return function


class Factory:
    @staticmethod
    def create(first, second):
        def sum_of(x):
            def deeper(y):
                return first(x) + y

            return deeper

        return sum_of if second else lambda x: first(x)

    @classmethod
    def tuned(cls, factor):
        function = within(factor)
        function.__vector_size__ = 4
        return function


def chosen(which, by):
    if which:

        def function(x):
            return x + by

    else:

        def function(x):
            return x - by

    return function


def scaled(by):
    @cute.jit
    def function(x):
        return x * by

    function.__vector_size__ = 2
    return function


@pytest.mark.parametrize(
    "function",
    [within(3), within(2.5), Factory.create(within(3), True), Factory.create(abs, False),
     Factory.create(within(1), True)(4), chosen(True, 2), chosen(False, 2), within(Config(2, int).threads),
     chosen(True, chosen(False, 5)(1))],
)  # fmt: skip
def test_a_function_made_inside_a_function_comes_back(function):
    """By its place in the module's code and the values of its free variables."""
    actual = there_and_back(function)
    assert actual is not function and actual.__code__ is function.__code__
    result, wanted = actual(5), function(5)
    assert result(6) == wanted(6) if callable(wanted) else result == wanted


def test_a_function_of_the_dsl_comes_back_with_its_attributes():
    result, plain = there_and_back(scaled(0.1)), there_and_back(Factory.tuned(3))
    assert result.__vector_size__ == 2 and plain.__vector_size__ == 4
    assert closures.is_jit(result) and not closures.is_jit(plain)
    assert result.__wrapped__.__closure__[0].cell_contents == 0.1


@pytest.mark.parametrize(
    "change", [{"place": "other"}, {"place": "function#3"}, {"free": {}}, {"free": {"by": 1, "more": 2}}, {"place": ""}]
)
def test_a_place_without_such_a_function_is_refused(change):
    data = {"closure": f"{__name__}:chosen", "place": "function", "free": {"by": 1}}
    assert fakes.CallReader.of({}).value(data)(5) == 6
    with pytest.raises(BuildError, match="is not in chosen"):
        fakes.read(f"{__name__}:facts", {"fakes": [data | change]})


def facts(tensor):
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown():
        return str(tensor.mlir_type)


def test_one_symbol_is_one_extent_and_two_are_two():
    m, n = cute.sym_int(divisibility=4), cute.sym_int(divisibility=4)
    tensors = [make_fake_tensor(cutlass.Float32, shape, (cute.sym_int64(), 1)) for shape in ((m, n), (m, m))]
    first, second = there_and_back(tensors)
    assert first.shape[0] is second.shape[0] is second.shape[1]
    assert first.shape[1] is not first.shape[0]


def strided(x, s0, s2):
    """A host function with parameters called as symbols might be."""


def test_no_symbol_has_the_name_of_a_parameter():
    x = make_fake_tensor(cutlass.Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
    call = fakes.write(strided, (x, cutlass.Int32(2), cutlass.Int32(1)), {})
    assert [*call.params["symbols"]] == ["s1", "s3", "s4"]


M = cute.sym_int(divisibility=8)
TENSORS = {
    "fake": make_fake_tensor(cutlass.BFloat16, (M, 64), (cute.sym_int64(divisibility=8), 1), assumed_align=16),
    "rank 1, no alignment": make_fake_tensor(cutlass.Int64, (M,), (1,)),
    "8 bits": make_fake_tensor(cutlass.Float8E4M3FN, (M, M), (1, cute.sym_int()), assumed_align=128),
    "4 bits": make_fake_tensor(cutlass.Float4E2M1FN, (M, 64), (64, 1), assumed_align=16),
    "shared memory": make_fake_tensor(cutlass.Float32, (32,), (1,), memspace=cute.AddressSpace.smem),
    "static": from_dlpack(np.zeros((16, 32), np.float32)),
    "dynamic": from_dlpack(np.zeros((16, 32), np.float16), assumed_align=16).mark_layout_dynamic(),
    "compact": from_dlpack(np.zeros((16, 32), np.float32)).mark_compact_shape_dynamic(0, (0, 1), 8),
    "compact within": from_dlpack(np.zeros((4, 8, 16), np.float16), assumed_align=16)
    .mark_layout_dynamic()
    .mark_compact_shape_dynamic(2, (0, 1, 2), 8),
    "transposed": from_dlpack(np.zeros((16, 32), np.int32).T).mark_layout_dynamic(0),
    "32-bit strides": from_dlpack(np.zeros((4, 8, 16), np.int32), use_32bit_stride=True).mark_layout_dynamic(),
    "scalar": from_dlpack(np.zeros((), np.float32)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_a_fake_of_the_type_that_is_compiled(name):
    rebuilt = facts(there_and_back(TENSORS[name]))
    TENSORS[name].__c_pointers__() if hasattr(TENSORS[name], "_dltensor_wrapper") else None
    assert rebuilt == facts(TENSORS[name])


def test_the_divisor_of_a_compact_extent_is_that_of_the_strides():
    result = there_and_back(TENSORS["compact within"])
    assert [item if isinstance(item, int) else item.divisibility for item in result.stride] == [8, 8, 1]


def test_an_array_of_a_framework_is_what_the_dsl_makes_of_it():
    array = np.zeros((16, 32), np.float32)
    assert facts(there_and_back(array)) == facts(from_dlpack(array).mark_layout_dynamic())


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_tensor_of_pytorch_becomes_a_fake_by_its_layout(dtype, wrap):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros(6, 16, 32, dtype=getattr(torch, dtype))[:, :, :16]
    dynamic = from_dlpack(tensor, assumed_align=16).mark_layout_dynamic()
    result = there_and_back(dynamic if wrap else tensor)
    assert facts(result) == facts(dynamic if wrap else from_dlpack(tensor).mark_layout_dynamic())
    assert [extent if isinstance(extent, int) else "?" for extent in result.stride] == ["?", "?", 1]


def test_a_pointer_keeps_type_space_and_alignment():
    result = there_and_back(make_ptr(cutlass.Float16, 4096, cute.AddressSpace.gmem, assumed_align=32))
    assert (result.dtype, result.memspace, result._assumed_align) == (cutlass.Float16, cute.AddressSpace.gmem, 32)


def itself():
    holder = Holder()
    holder.me = holder
    return holder


class Slotted:
    __slots__ = ("a",)


class Slots(Slotted):
    """Has attributes, and one that is not among them."""


REFUSED = {
    "a class that is made as the program runs": (lambda: type("Made", (), {})(), "made inside a function"),
    "slots": (Slots, "more than attributes"),
    "a closure of more than values": (lambda: within(threading.Lock()), r"it\.factor is .* more than attributes"),
    "a closure that calls itself": (recursive, r"it\.again is inside itself"),
    "a closure of a variable without a value": (early, "made inside a function"),
    "a decorated closure": (lambda: functools.cache(within(3)), "more than attributes"),
    "a closure under another decorator": (lambda: named(within(3)), "made inside a function"),
    "a closure of a function that is replaced": (lambda: REPLACED, "made inside a function"),
    "a lock": (threading.Lock, "more than attributes"),
    "an open file": (lambda: open(os.devnull), "more than attributes"),  # noqa: SIM115, PTH123
    "itself": (itself, "is inside itself"),
    "a thing in a thing": (lambda: Holder(a=[Holder(lock=threading.Lock())]), r"it\.a\[0\]\.lock"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused_in_words(name):
    make, says = REFUSED[name]
    with pytest.raises(BuildError, match=says):
        fakes.CallWriter().value(make(), "it")


def test_a_function_of_the_script_itself_is_refused_with_what_to_do():
    def function():
        pass

    function.__module__, function.__qualname__ = "__main__", "function"
    with pytest.raises(BuildError, match=r"of the script that runs.*move it to a module"):
        fakes.importable(function, "it")


@pytest.mark.parametrize(
    ("data", "says"),
    [({"odd": 1}, "has one of"), ({"name": "tests.nothing:x"}, "cannot be imported"), ({"number": "None"}, "no type"),
     ({"tensor": "Float32", "shape": ["s9"], "stride": [1], "align": 4}, "no symbol")],
)  # fmt: skip
def test_data_that_is_wrong_is_refused_in_words(data, says):
    with pytest.raises(BuildError, match=says):
        fakes.CallReader.of({}).value(data)


SOURCE = "examples.cute.rows:SquareSum"


@pytest.mark.parametrize(
    "params",
    [{"fakes": [{"tensor": "Float32"}]}, {"fakes": [], "state": 5}, {"fakes": 7}, {"fakes": [], "method": "nothing"},
     {"fakes": [{"pointer": "Float32", "align": 4, "memory": "attic"}]}, {"fakes": [], "symbols": {"s0": {"bits": 5}}}],
    ids=str,
)  # fmt: skip
def test_params_that_are_wrong_are_refused_in_words(params):
    with pytest.raises(BuildError, match=r"cannot be read .*; capture the call again"):
        fakes.read(SOURCE, params)
