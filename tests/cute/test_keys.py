"""What a compilation is filed under: what changes what is compiled is a miss, and what does not is a hit."""

import dataclasses
import functools
import importlib.util
import pickle
import sys
import threading
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cutlass import cute
from cutlass.base_dsl.compiler import Compiler, EnableTVMFFI
from cutlass.cutlass_dsl import CuTeDSL

from fusekit.compiler import toolchain
from fusekit.cute import blobs
from tests.cute import kernels
from tests.cute.rig import HIT, MISS
from tests.cute.subject import filled

pytestmark = pytest.mark.usefixtures("device")
PARTS = ("", "-libs-cu12", "-libs-cu13")


def edited(text, new):
    """The kernel of an edited copy of the module."""
    source = Path(kernels.__file__).read_text()
    assert text in source

    def change(monkeypatch, folder):
        (folder / "kernels.py").write_text(source.replace(text, new))
        spec = importlib.util.spec_from_file_location(kernels.__name__, folder / "kernels.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, kernels.__name__, module)
        spec.loader.exec_module(module)
        return module.compile_kernel

    return change


def setting(name, value):
    return lambda monkeypatch, folder: monkeypatch.setattr(kernels, name, value)


def variable(name, value):
    def change(monkeypatch, folder):
        kernels.cached.cache_clear()
        monkeypatch.setenv(name, value)

    return change


def file(monkeypatch, folder):
    (folder / "number").write_text("18")
    monkeypatch.setenv("CACHE_FILE", str(folder / "number"))


def options(text):
    return lambda monkeypatch, folder: functools.partial(kernels.compile_kernel, text)


def of_the_class(owner, name, value):
    return lambda monkeypatch, folder: monkeypatch.setattr(owner, name, value)


def made_as_it_runs(code):
    """What the kernel reads comes from code that is a string."""

    def change(monkeypatch, folder):
        space = {"kernels": kernels}
        exec(code, space)
        monkeypatch.setattr(kernels, "ADD", space["add"])

    return change


def replaced_compiler(number):
    """A package replaces a method of the DSL's compiler."""

    def change(monkeypatch, folder):
        original = Compiler.compile

        @functools.wraps(original)
        def compile(self, *args, **kwargs):
            assert number
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Compiler, "compile", compile)

    return change


def unpickled(monkeypatch, folder):
    kernel = pickle.loads(pickle.dumps(kernels.Kernel()))
    return lambda: cute.compile(kernel, kernels.fake())


def with_options(bias):
    def work():
        kernel = kernels.Kernel()
        kernel.options = kernels.Options(bias)
        return cute.compile(kernel, kernels.fake())

    return lambda monkeypatch, folder: work


def other_thread(monkeypatch, folder):
    def work():
        thread = threading.Thread(target=kernels.compile_kernel)
        thread.start()
        thread.join()

    return work


def other_thread_index(monkeypatch, folder):
    original = cute.arch.thread_idx
    monkeypatch.setattr(cute.arch, "thread_idx", lambda **named: (original(**named)[1],) * 3)


def default_of_the_dataclass(monkeypatch, folder):
    monkeypatch.setattr(kernels, "Options", dataclasses.make_dataclass("Options", [("bias", int, 2)]))


CHANGES = {
    "nothing": (lambda monkeypatch, folder: None, HIT),
    "a global": (setting("SCALE", 4), MISS),
    "a name computed at run time": (setting("WIDTH", 64), MISS),
    "a function in a table": (setting("TABLE", {"f": lambda x: x * 4}), MISS),
    "the same function, anew": (setting("TABLE", {"f": lambda x: x * 3}), HIT),
    "a closure": (setting("ADD", kernels.operation(20)), MISS),
    "the same closure, anew": (setting("ADD", kernels.operation(19)), HIT),
    "code of a string": (made_as_it_runs("def add(x): return x + 21"), MISS),
    "the same in code of a string": (made_as_it_runs("def add(x): return x + 19"), HIT),
    "an attribute of a class": (of_the_class(kernels.Config, "FACTOR", 6), MISS),
    "one of a base class": (of_the_class(kernels.Base, "K", 8), MISS),
    "a method's class": (of_the_class(kernels.Kernel, "K", 9), MISS),
    "a default of a dataclass": (default_of_the_dataclass, MISS),
    "a field": (with_options(3), MISS),
    "the same field": (with_options(1), HIT),
    "a variable read in the trace": (variable("CACHE_LATE", "14"), MISS),
    "a variable behind lru_cache": (variable("CACHE_CACHED", "12"), MISS),
    "a variable that nothing reads": (variable("CACHE_NOTHING", "1"), HIT),
    "a file": (file, MISS),
    "an edited line": (edited("return x + k", "return x - k"), MISS),
    "a comment, in another folder": (edited("return x + k", "return x + k  # the same"), HIT),
    "a line above": (edited("SCALE = 2", "\n\n\nSCALE = 2"), HIT),
    "an object that was pickled": (unpickled, HIT),
    "another thread": (other_thread, HIT),
    "a function of the DSL, in the trace": (other_thread_index, MISS),
    "one of its compiler": (replaced_compiler(1), MISS),
    "the level of optimisation": (options("--opt-level=1"), MISS),
    "an option of ptxas": (options("--ptxas-options=-v"), MISS),
    "line information": (options("--generate-line-info"), MISS),
    "a cubin that is kept": (options("--keep-cubin --dump-dir=/tmp"), MISS),
    "a variable of the DSL": (variable("CUTE_DSL_SOMETHING", "1"), MISS),
    "a folder of the DSL": (variable("CUTE_DSL_CACHE_DIR", "/nowhere"), HIT),
    "another CUDA toolkit": (variable("CUDA_HOME", "/nowhere"), MISS),
}


# What another one shows as well.
LONG = {
    "the same function, anew", "the same in code of a string", "one of a base class", "a method's class",
    "a variable that nothing reads", "an option of ptxas", "the same field", "an object that was pickled",
    "a line above", "a folder of the DSL",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_a_miss_or_a_right_hit(name, rig, monkeypatch, tmp_path, capsys, soak):
    if name in LONG and not soak:
        pytest.skip("only with --soak")
    change, expected = CHANGES[name]
    if name == "a cubin that is kept":
        change = options(f"--keep-cubin --dump-dir={tmp_path}")
    work = change(monkeypatch, tmp_path) or kernels.compile_kernel
    try:
        # A hit is compiled as well, and its host object compared.
        assert rig.counted(work, verify=1.0) == expected
    finally:
        kernels.cached.cache_clear()
    assert "is not what the DSL compiles" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, device):
    kernels.cached.cache_clear()
    return filled(tmp_path_factory.mktemp("recorded"), kernels.compile_kernel)


# What level 1 finds as it was. Values count by the module of their code, and files by all that is in them.
SAME = {"nothing", "the same closure, anew", "the same field", "a variable that nothing reads"}
# What other tests show, in a process that has loaded no other copy of a kernel.
ELSEWHERE = {"an object that was pickled", "another thread", "a folder of the DSL"}


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ELSEWHERE])
def test_a_change_is_traced_at_level_1(name, recorded, monkeypatch, tmp_path, soak):
    if name in LONG and not soak:
        pytest.skip("only with --soak")
    change, _ = CHANGES[name]
    monkeypatch.setattr(recorded, "work", change(monkeypatch, tmp_path) or kernels.compile_kernel)
    try:
        traced = bool(recorded.traced())
    finally:
        kernels.cached.cache_clear()
    assert traced == (name not in SAME)


def test_a_mock_in_the_compiler_has_no_name_for_a_key(rig, monkeypatch, capsys):
    original = Compiler.compile
    mock = MagicMock(side_effect=lambda *args, **kwargs: original(compiler, *args, **kwargs))
    compiler = CuTeDSL._get_dsl().compiler_provider
    monkeypatch.setattr(Compiler, "compile", mock)
    assert rig.counted(miss="warn") == MISS
    assert "replaced by a MagicMock, which no key can name" in capsys.readouterr().err
    assert len(list(rig.root.glob("entries/*/*.json"))) == 1


def test_two_functions_that_replace_the_same_are_two_keys(empty, monkeypatch):
    for number, expected in ((1, MISS), (2, MISS), (1, HIT)):
        with monkeypatch.context() as patch:
            replaced_compiler(number)(patch, None)
            assert empty.counted() == expected


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (blobs, "cpu", lambda: "another processor"),
        (blobs.platform, "machine", lambda: "riscv64"),
        (blobs.platform, "python_version_tuple", lambda: ("3", "99", "0")),
        (toolchain, "distributions", lambda: {f"nvidia-cutlass-dsl{part}": "4.8.1+local.0" for part in PARTS}),
    ],
    ids=["processor", "machine", "Python", "toolchain"],
)  # fmt: skip
def test_another_machine_is_another_key(rig, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    assert rig.counted() == MISS


def test_checks_of_launches_are_in_the_key(empty):
    """They are added after the passes, to functions for tvm-ffi."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    for selectors, expected in ((set(), MISS), ({"launch-check"}, MISS), (set(), HIT), ({"launch-check"}, HIT)):
        compiler = cute.compile[EnableTVMFFI]
        compiler._compile_options._debug_selectors = selectors
        work = functools.partial(compiler, kernels.Kernel(), kernels.fake())
        assert empty.counted(work, verify=1.0) == expected


def test_a_compiler_of_another_package_is_not_served(empty, monkeypatch, capsys):
    compiler = CuTeDSL._get_dsl().compiler_provider

    class Special(type(compiler)):
        pass

    monkeypatch.setattr(compiler, "__class__", Special)
    assert empty.counted(miss="warn") == MISS
    assert "it is compiled by tests.cute.test_keys, which is no part of the DSL" in capsys.readouterr().err


def test_an_unknown_version_of_the_dsl_compiles(rig, monkeypatch, capsys):
    monkeypatch.setattr(cutlass, "__version__", "5.0.0")
    assert rig.counted(miss="warn") == MISS
    assert "CuTe DSL 5.0.0 is not known to this fusekit" in capsys.readouterr().err


def test_a_stream_by_its_address_is_in_no_key(empty):
    assert empty.counted(lambda: kernels.compile_scale(0x7F001000)) == MISS
    assert empty.counted(lambda: kernels.compile_scale(0x7F002000)) == HIT


@cute.jit
def raw(x, number: cutlass.Constexpr):
    kernels.scaled(x, x, cutlass.Float32(1), cutlass.Int64(1)).launch(grid=(number, 1, 1), block=(32, 1, 1))


def test_the_elements_of_a_tensor_are_in_no_key(empty, capsys):
    """A framework's tensor is in the name of a function, which has room for some of its elements."""

    def compile_raw(first, count, number=2, **options):
        return cute.compile(raw, np.arange(first, first + count, dtype=np.float32), number, **options)

    assert empty.counted(lambda: compile_raw(1, 3)) == MISS
    for first, count in ((777, 3), (1, 64), (777, 64)):  # sizes are dynamic
        assert empty.counted(lambda first=first, count=count: compile_raw(first, count), verify=1.0) == HIT
    for first, expected in ((1111, MISS), (2222, HIT)):
        assert empty.counted(lambda first=first: compile_raw(first, 64, options="--generate-line-info")) == expected
    assert empty.counted(lambda: compile_raw(1, 3, 4)) == MISS
    assert "is not what the DSL compiles" not in capsys.readouterr().err
    counts, function = empty.run(lambda: compile_raw(5, 64))
    assert counts == HIT and function.function_name.startswith("cutlass_raw_1_2_3_")


def test_the_specs_of_tvm_ffi_are_in_the_key(empty, monkeypatch):
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    converter = importlib.import_module("cutlass.cute._tvm_ffi_args_spec_converter")
    tvm_ffi = functools.partial(kernels.compile_kernel, "--enable-tvm-ffi")
    assert empty.counted(tvm_ffi) == MISS
    assert empty.counted() == MISS  # without
    assert empty.counted(tvm_ffi, verify=1.0) == HIT
    original = converter._convert_single_arg

    def changed(*args):
        param = original(*args)
        param.data_alignment = 64
        return param

    monkeypatch.setattr(converter, "_convert_single_arg", changed)
    assert empty.counted(tvm_ffi) == MISS
