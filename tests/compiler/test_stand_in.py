"""`fusekit.compile`: the store first, then the compiler; and launches with the host function's own arguments."""

import contextlib
import dataclasses
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import fusekit
from fusekit import stand_in
from fusekit.abi import LaunchRecord
from fusekit.compiler import pool
from fusekit.compiler.build import build
from fusekit.compiler.new_extern import trace_source
from fusekit.config import Config
from fusekit.errors import ArgumentError, BuildError, ToolchainError
from fusekit.runtime.driver import Driver
from fusekit.store import Store
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
import foreignkernels
import hostfunctions
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_tensor

from examples.cute import rows

ARCH = "--gpu-arch=sm_90a"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(store=tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def environment(config, monkeypatch):
    monkeypatch.setenv("FUSEKIT_STORE", str(config.store))
    for name in ("FUSEKIT_STORES", "FUSEKIT_ALLOW_EXTERN"):
        monkeypatch.delenv(name, raising=False)


def test_without_the_compiler_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.compiler", None)
    with pytest.raises(ToolchainError, match=r"pip install 'llvmlite"):
        fusekit.compile(print)
    monkeypatch.setattr("importlib.metadata.distributions", list)
    with pytest.raises(ToolchainError, match=r"pip install 'llvmlite"):
        trace_source("foreignkernels:nothing", "sm_90a", {})


@pytest.fixture
def no_compiler(monkeypatch):
    """Compile processes are an error."""

    @contextlib.contextmanager
    def processes(jobs):
        raise AssertionError("something was compiled")
        yield

    monkeypatch.setattr(pool, "processes", processes)


def vector():
    return make_fake_tensor(cutlass.Float32, (cute.sym_int(divisibility=4),), (1,), assumed_align=16)


def compile_kinds():
    given = ((vector(), vector()), 64, None, cutlass.Int32(1), cutlass.Float32(1.0), CUstream(0))
    return fusekit.compile(hostfunctions.of_all_kinds, *given, options=ARCH)


@pytest.fixture
def launched(config, monkeypatch):
    """launched(compiled) -> the fake driver that its launches go to."""

    def to_fake(compiled):
        store = Store.open(config)
        entry, _ = store.load(store.find_name(compiled.name, compiled.arch).key)
        first, *rest = LaunchRecord.from_json(dict(entry.launch)).launches
        sizes = {entry.symbol: [(item.offset, item.size) for item in entry.parameters] for entry in (first, *rest)}
        fake = FakeDriver(sizes.pop(first.symbol), symbol=first.symbol, others=sizes)
        compiled._library = stand_in._overlapping(store, Driver(fake))
        return fake

    return to_fake


def test_what_is_not_there_is_compiled_and_what_is_there_is_not(monkeypatch, request):
    first = compile_kinds()
    request.getfixturevalue("no_compiler")
    again = compile_kinds()
    assert first.name == again.name
    assert first.name.startswith("compiled/of_all_kinds-")
    with pytest.raises(AssertionError, match="something was compiled"):
        fusekit.compile(rows.SquareSum(8), *rows.arguments(8)[1], options=ARCH)


def test_a_store_that_was_filled_from_a_captured_spec_serves(config, tmp_path, request):
    function, arguments = rows.arguments(2)
    with fusekit.capture() as result:
        cute.compile(function, *arguments, options=ARCH)
    report = build([result.write(tmp_path / "found.toml")], config=config, allow_extern=True)
    assert report.ok, report.failed
    request.getfixturevalue("no_compiler")
    function, arguments = rows.arguments(2)
    compiled = fusekit.compile(function, *arguments, options=ARCH)
    assert Store.open(config).find_name(compiled.name, "sm_90a").key == report.built[0].key


def test_a_name_that_now_points_to_other_code_is_not_launched(config, launched):
    compiled, store = compile_kinds(), Store.open(config)
    fake = launched(compiled)
    own = store.find_name(compiled.name, compiled.arch)
    other = fusekit.compile(rows.SquareSum(8), *rows.arguments(8)[1], options=ARCH)
    store.publish_name(dataclasses.replace(store.find_name(other.name, other.arch), name=own.name))
    try:
        compiled(*CALLS["by position"][0])
        assert len(fake.launches) == 2
    finally:
        store.publish_name(own)


def test_other_arguments_are_another_kernel():
    plain = make_fake_tensor(cutlass.Float32, (64,), (1,), assumed_align=16)
    given = ((plain, vector()), 64, None, cutlass.Int32(1), cutlass.Float32(1.0), CUstream(0))
    other = fusekit.compile(hostfunctions.of_all_kinds, *given, options=ARCH)
    assert other.name != compile_kinds().name


A, B = Torchlike((64,), "torch.float32", 0x1000_0000), Torchlike((32,), "torch.float32", 0x2000_0000)
CALLS = {
    "by position": (((A, B), None, 7, 0.5, 5), {}),
    "by name": (((A, B),), {"absent": None, "scale": 0.5, "n": 7, "stream": 5}),
    "numbers of the DSL": (([A, B], None, cutlass.Int32(7), cutlass.Float32(0.5), CUstream(5)), {}),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_launch_takes_the_arguments_of_the_host_function(launched, how):
    compiled = compile_kinds()
    fake = launched(compiled)
    args, kwargs = CALLS[how]
    compiled(*args, **kwargs)
    first, second = fake.launches
    assert (first.stream, first.block) == (5, (64, 1, 1))
    assert struct.unpack_from("<Q", first.parameters[0])[0] == A.address
    assert struct.unpack("<i", first.parameters[1])[0] == 7
    assert struct.unpack_from("<Q", second.parameters[0])[0] == B.address
    assert struct.unpack("<f", second.parameters[1])[0] == 0.5


def test_an_integer_that_is_an_extent_is_given_as_to_the_dsl(launched):
    function, given = foreignkernels.sized()
    compiled = fusekit.compile(function, *given, options=ARCH)
    fake = launched(compiled)
    compiled(A, (64, 3), 5)
    assert (fake.launches[0].grid, fake.launches[0].stream) == ((3, 1, 1), 5)


def test_a_truth_value_is_given_as_to_the_dsl(launched):
    function, given = foreignkernels.flagged()
    compiled = fusekit.compile(function, *given, options=ARCH)
    fake = launched(compiled)
    long = Torchlike((300,), "torch.float32", 0x1000_0000)
    compiled(long, False)
    compiled(long, True)
    assert [launch.grid[0] for launch in fake.launches] == [1, 3]


def test_what_configures_the_launch_is_that_of_the_call_that_was_compiled(launched):
    function, given = foreignkernels.configuring()
    compiled = fusekit.compile(function, *given, options=ARCH)
    fake = launched(compiled)
    compiled(A, True, 64, cutlass.Int32(1024), 7, 5)
    first, second = fake.launches
    assert (first.grid, first.block, first.shared, second.block) == ((7, 1, 1), (64, 1, 1), 1024, (32, 1, 1))
    for other in ((False, 64, 1024), (True, 128, 1024)):
        with pytest.raises(ArgumentError, match=r"configured by it and was compiled for (1|64); call fusekit.compile"):
            compiled(A, *other, 7, 5)
    assert len(fake.launches) == 2
    compiled.kernel(y=A, priority_=7, priority=-1, stream=5)


def test_tensors_may_overlap_as_with_the_dsl(launched):
    compiled = compile_kinds()
    fake = launched(compiled)
    compiled((A, A), None, 7, 0.5, 0)
    assert len(fake.launches) == 2


def test_a_tensor_of_the_dsl_is_taken(launched):
    compiled = compile_kinds()
    fake = launched(compiled)
    array = np.zeros(72, np.float32)
    start = -array.ctypes.data % 16 // 4
    tensor = from_dlpack(array[start : start + 64]).mark_layout_dynamic()
    compiled((tensor, B), None, 7, 0.5, 0)
    assert struct.unpack_from("<Q", fake.launches[0].parameters[0])[0] == tensor.data_ptr


def test_what_the_program_changed_in_a_module_is_refused_although_the_store_has_the_kernel(monkeypatch):
    function, arguments = rows.arguments(2)
    fusekit.compile(function, *arguments, options=ARCH)
    monkeypatch.setattr(rows, "THREADS", 128)
    with pytest.raises(BuildError, match=r"rows\.THREADS is 128 in the program that compiles, and 256 after a fresh"):
        fusekit.compile(function, *arguments, options=ARCH)
    monkeypatch.setattr(rows, "THREADS", 256)
    fusekit.compile(function, *arguments, options=ARCH)


def test_a_bound_launch_of_the_same_arguments(launched):
    compiled = compile_kinds()
    fake = launched(compiled)
    stream, arguments = compiled.arguments((A, B), None, 7, 0.5, 5)
    assert sorted(arguments) == ["n", "pair_0", "pair_1", "scale"]
    compiled.kernel.bind(**arguments)(stream)
    assert len(fake.launches) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [(((A, B), None), "missing a required argument: 'n'"), (((A,), None, 7, 0.5, 0), "pair must be 2 values"),
     (((A, "text"), None, 7, 0.5, 0), "pair_1 is a str"), (((A, B), A, 7, 0.5, 0), "absent was compiled as None"),
     (((A, Torchlike((30,), "torch.float32", 0x2000_0000)), None, 7, 0.5, 0), "multiple of 4")],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_in_words(launched, args, says):
    compiled = compile_kinds()
    fake = launched(compiled)
    with pytest.raises(ArgumentError, match=says):
        compiled(*args)
    assert not fake.launches


def test_what_cannot_be_written_as_a_spec_is_refused_in_words():
    @cute.jit
    def own(x: cute.Tensor):
        pass

    with pytest.raises(BuildError, match=r"made inside a function.*write a function of a module"):
        fusekit.compile(own, vector(), options=ARCH)


def test_what_no_record_can_say_is_refused_in_words():
    given = (vector(), cutlass.Int32(1), cutlass.Float32(1.0), CUstream(0))
    with pytest.raises(BuildError, match="launches no kernel"):
        fusekit.compile(hostfunctions.nothing, *given, options=ARCH)


def test_a_refused_launch_is_reported_with_the_line_of_its_kernel():
    given = (vector(), cutlass.Int32(1), cutlass.Float32(1.0), CUstream(0))
    source = Path(hostfunctions.__file__).read_text().splitlines()
    with pytest.raises(BuildError, match="another stream than the one that it is given") as caught:
        fusekit.compile(hostfunctions.decorated, *given, options=ARCH)
    (line,) = re.findall(r"functions\.py, line (\d+)\)", str(caught.value))
    assert source[int(line) - 1].startswith("def store_decorated(")


class Pair(NamedTuple):
    first: object
    width: cutlass.Constexpr
    rest: tuple


@dataclasses.dataclass
class Holder:
    pair: Pair
    width: cutlass.Constexpr = 3


def test_members_are_taken_as_the_trace_has_them():
    template = Holder(Pair(cutlass.Int32(1), 64, (vector(), None, cutlass.Float32(1.0))))
    value = Holder(Pair(7, 128, (A, None, 0.5)), 9)
    result = [(leaf.name, item) for leaf, item in stand_in._pairs("it", template, value)]
    assert result == [("it_pair_first", 7), ("it_pair_rest_0", A), ("it_pair_rest_2", 0.5)]


def test_one_library_serves_a_store(config):
    assert stand_in._library(config) is stand_in._library(Config(store=config.store))


def test_the_dsls_own_values_are_taken_as_what_the_record_says():
    """A tensor or a pointer that a program made with the DSL: its types are named as records name them."""
    import cutlass

    class _Tensor:
        data_ptr, element_type, shape, stride = 64, cutlass.Float8E4M3FN, (2, 3), (3, 1)

    class _Pointer:
        _pointer, dtype = 128, cutlass.Boolean

    kernel = SimpleNamespace(device=0)
    assert stand_in._plain(_Tensor(), kernel).dtype == "e4m3"
    assert stand_in._plain(_Pointer(), kernel).dtype == "u8"
