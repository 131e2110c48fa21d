"""What code compiles with the CuTe DSL, written down and built again elsewhere: the same cubins, bit for bit."""

import enum
import json
import operator
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fusekit
from fusekit.errors import BuildError, SpecError, UsageError
from fusekit.spec.parse import parse_text

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.base_dsl.compiler import CompileCallable, FrontendNext, GPUArch, OptLevel
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.runtime import from_dlpack, make_fake_tensor, make_ptr
from cutlass.cutlass_dsl import CuTeDSL

from fusekit.compiler import fakes
from fusekit.compiler.capture import _arguments
from fusekit.compiler.cubin import kernels
from tests.compiler.sass import instructions
from tests.examples.cute import fusion, rows

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "examples" / "cute"
ARCH = "--gpu-arch=sm_90a"
ORIGINAL, FUNCTION = CompileCallable.__call__, BaseDSL._func


def compile_here(function, *args, options=ARCH):
    return cute.compile(function, *args, options=options)


class Shape(enum.Enum):
    ROUND = 1


class Config(NamedTuple):
    threads: int
    dtype: type


class Holder:
    def __init__(self, **state):
        self.__dict__.update(state)


@cute.jit
def copies(x: cute.Tensor, n: cutlass.Constexpr, scale: cutlass.Float32):
    rows.SquareSum(n)


@cute.jit
def sizes(x: cute.Tensor, size: cutlass.Int64):
    pass


# -- values


def there_and_back(value):
    writer = fakes.Writer()
    data = json.loads(json.dumps(writer.value(value, "it")))
    return fakes.Reader.of(writer.symbols).value(data)


@pytest.mark.parametrize(
    "value",
    [1, -2.5, -0.0, float("-inf"), True, "text", None, (1, (2, "a")), [1, None], {"a": 1, 2: (3,)}, Shape.ROUND,
     cutlass.BFloat16, rows.SquareSum, Config(128, cutlass.Float16), operator.add, max,
     {"deep": [Config(1, cutlass.Int8), (Shape.ROUND,)]},
    ],
    ids=str,
)  # fmt: skip
def test_values_come_back(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_objects_come_back_with_their_attributes():
    found = there_and_back(Holder(a=1, b=Holder(c=(cutlass.Float32, None))))
    assert type(found) is Holder
    assert (found.a, found.b.c) == (1, (cutlass.Float32, None))


def test_numbers_of_the_dsl_keep_their_type():
    found = there_and_back([cutlass.Float32(0.5), cutlass.Int64(7), cutlass.Boolean(True)])
    assert [(type(each), each.value) for each in found] == [
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
        found = there_and_back(function)
        assert found is not function
        assert found(5) == function(5)


def test_a_lambda_keeps_its_place_among_others_in_a_line():
    assert [there_and_back(each)(5) for each in LAMBDAS[:2]] == [6, 4]


@pytest.mark.parametrize("function", [halving(), within(3), LAMBDAS[2]])
def test_a_lambda_with_more_than_its_text_is_refused(function):
    with pytest.raises(BuildError, match=r"made inside a function|gives something else"):
        fakes.Writer().value(function, "it")


def test_text_that_is_no_lambda_is_not_run():
    with pytest.raises(BuildError, match="is no lambda"):
        fakes.read(f"{__name__}:copies", {"fakes": [{"lambda": "exit()", "module": __name__}]})


def facts(tensor):
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown():
        return str(tensor.mlir_type)


def test_one_symbol_is_one_extent_and_two_are_two():
    m, n = cute.sym_int(divisibility=4), cute.sym_int(divisibility=4)
    made = [make_fake_tensor(cutlass.Float32, shape, (cute.sym_int64(), 1)) for shape in ((m, n), (m, m))]
    first, second = there_and_back(made)
    assert first.shape[0] is second.shape[0] is second.shape[1]
    assert first.shape[1] is not first.shape[0]


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
    made = facts(there_and_back(TENSORS[name]))
    TENSORS[name].__c_pointers__() if hasattr(TENSORS[name], "_dltensor_wrapper") else None
    assert made == facts(TENSORS[name])


def test_the_divisor_of_a_compact_extent_is_that_of_the_strides():
    found = there_and_back(TENSORS["compact within"])
    assert [each if isinstance(each, int) else each.divisibility for each in found.stride] == [8, 8, 1]


def test_an_array_of_a_framework_is_what_the_dsl_makes_of_it():
    array = np.zeros((16, 32), np.float32)
    assert facts(there_and_back(array)) == facts(from_dlpack(array).mark_layout_dynamic())


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_tensor_of_pytorch_becomes_a_fake_by_its_layout(dtype, wrap):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros(6, 16, 32, dtype=getattr(torch, dtype))[:, :, :16]
    made = from_dlpack(tensor, assumed_align=16).mark_layout_dynamic()
    found = there_and_back(made if wrap else tensor)
    assert facts(found) == facts(made if wrap else from_dlpack(tensor).mark_layout_dynamic())
    assert [extent if isinstance(extent, int) else "?" for extent in found.stride] == ["?", "?", 1]


def test_a_pointer_keeps_type_space_and_alignment():
    found = there_and_back(make_ptr(cutlass.Float16, 4096, cute.AddressSpace.gmem, assumed_align=32))
    assert (found.dtype, found.memspace, found._assumed_align) == (cutlass.Float16, cute.AddressSpace.gmem, 32)


def itself():
    holder = Holder()
    holder.me = holder
    return holder


class Slotted:
    __slots__ = ("a",)


class Slots(Slotted):
    """Has attributes, and one that is not among them."""


REFUSED = {
    "slots": (Slots, "more than attributes"),
    "a closure": (lambda: within(3), "made inside a function"),
    "a lock": (threading.Lock, "more than attributes"),
    "an open file": (lambda: open(os.devnull), "more than attributes"),  # noqa: SIM115, PTH123
    "itself": (itself, "is inside itself"),
    "a thing in a thing": (lambda: Holder(a=[Holder(lock=threading.Lock())]), r"it\.a\[0\]\.lock"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused_in_words(name):
    make, says = REFUSED[name]
    with pytest.raises(BuildError, match=says):
        fakes.Writer().value(make(), "it")


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
        fakes.Reader.of({}).value(data)


SOURCE = "tests.examples.cute.rows:SquareSum"


@pytest.mark.parametrize(
    "params",
    [{"fakes": [{"tensor": "Float32"}]}, {"fakes": [], "state": 5}, {"fakes": 7}, {"fakes": [], "method": "nothing"},
     {"fakes": [{"pointer": "Float32", "align": 4, "memory": "attic"}]}, {"fakes": [], "symbols": {"s0": {"bits": 5}}}],
    ids=str,
)  # fmt: skip
def test_params_that_are_wrong_are_refused_in_words(params):
    with pytest.raises(BuildError, match=r"cannot be read .*; capture the call again"):
        fakes.read(SOURCE, params)


# -- capturing


def test_the_call_does_what_it_does_and_nothing_is_left_behind():
    with fusekit.capture() as found:
        compiled = compile_here(*flat(fusion.arguments()))
    assert callable(compiled)
    assert CompileCallable.__call__ is ORIGINAL
    (kernel,) = found.kernels
    assert (kernel.name, kernel.arch, kernel.source) == ("silu_add", "sm_90a", "tests.examples.cute.fusion:silu_add")
    compile_here(*flat(fusion.arguments()))
    assert len(found.kernels) == 1


def flat(made):
    return made[0], *made[1]


def test_options_in_brackets_and_other_ways_to_call_are_found_too():
    from cutlass.cute import compile as compile_it

    with fusekit.capture() as found:
        compile_it(*flat(rows.arguments(1)), options=ARCH)
        cute.compile[OptLevel(2), GPUArch("sm_90a")](*flat(rows.arguments(1)))
        function, arguments = rows.arguments(1)
        compile_it(function.__call__, *arguments, options=ARCH + " --opt-level=2")
    first, second, third = found.kernels
    assert [each.name for each in found.kernels] == ["squaresum", "squaresum-2", "squaresum-3"]
    assert "options" not in first.params
    assert second.params["options"] == "--opt-level=2" == third.params["options"]
    assert third.params["method"] == "__call__"


class Doubled:
    """A host function that calls another one, as a method."""

    @cute.jit
    def run(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        fusion.silu_add(x, x, y, cutlass.Float32(2.0), stream)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.run(x, y, stream)


def test_host_functions_that_are_called_directly_are_found_as_if_they_were_compiled(monkeypatch):
    """Once for each call of the program's; what they call themselves is a part of them."""
    settings = CuTeDSL._get_dsl().envar
    monkeypatch.setattr(settings, "dryrun", True)  # nothing can be launched here
    monkeypatch.setattr(settings, "arch", "sm_90a")
    held = [np.zeros(64, np.float32) for _ in range(3)]
    x, residual, y = (from_dlpack(each, assumed_align=16).mark_layout_dynamic() for each in held)
    stream, doubled = CUstream(0), Doubled()
    calls = [(fusion.silu_add, x, residual, y, cutlass.Float32(1.0), stream), (doubled, x, y, stream),
             (doubled.run, x, y, stream)]  # fmt: skip
    with fusekit.capture() as direct:
        for function, *arguments in (*calls, calls[0]):
            function(*arguments)
    assert BaseDSL._func is FUNCTION
    monkeypatch.setattr(settings, "dryrun", False)
    with fusekit.capture() as compiled:
        for function, *arguments in calls:
            compile_here(function, *arguments)
    assert direct.toml() == compiled.toml() and len(direct.kernels) == 3 and not direct.problems


@pytest.mark.parametrize("name", ["Found.toml", "found", f"{'x' * 65}.toml", "a b.toml"])
def test_a_name_that_no_spec_file_can_have_is_refused(tmp_path, name):
    with fusekit.capture() as found:
        compile_here(*flat(fusion.arguments()))
    with pytest.raises(UsageError, match=r"a spec file is NAME\.toml.*; a name is lower-case"):
        found.write(tmp_path / name)
    assert not list(tmp_path.iterdir()) and found.write(tmp_path / "found.toml").is_file()


def test_the_same_thing_is_found_once_and_text_is_a_spec_file():
    with fusekit.capture() as found:
        for cluster in (1, 2, 1):
            compile_here(*flat(rows.arguments(cluster)))
    specs = parse_text(found.toml(), "found", "found.toml")
    assert [spec.full_name for spec in specs] == ["found/squaresum@base", "found/squaresum-2@base"]
    assert [spec.params["state"] for spec in specs] == [{"cluster": 1}, {"cluster": 2}]
    assert specs[0].arguments == {
        "x": {"role": "inout", "shape": ["s0", "s1"]}, "y": {"role": "inout", "shape": ["s0"]},
    }  # fmt: skip


def test_what_a_spec_cannot_say_is_a_problem_and_is_compiled_all_the_same():
    def inside():
        @cute.jit
        def own(x: cute.Tensor):
            pass

        return own

    fake = fusion.arguments()[1][0]
    with fusekit.capture() as found:
        assert compile_here(inside(), fake) is not None
        cute.compile[GPUArch("sm_90a"), FrontendNext](*flat(rows.arguments(1)))
    assert not found.kernels
    first, second = found.problems
    assert "made inside a function" in first
    assert "which a spec cannot say" in second
    with pytest.raises(SpecError, match=r"no kernel was captured: .*made inside a function"):
        found.toml()
    with fusekit.capture() as nothing:
        pass
    with pytest.raises(SpecError, match="nothing was compiled"):
        nothing.write("nothing.toml")


def test_line_information_is_left_out_and_changes_no_instruction(tmp_path):
    cubins = []
    with fusekit.capture() as found:
        for extra in ("", " --generate-line-info"):
            options = f"{ARCH} --keep-cubin --dump-dir={tmp_path}{extra}"
            cubins.append(compile_here(*flat(rows.arguments(1)), options=options).artifacts.CUBIN)
    (kernel,) = found.kernels
    assert "options" not in kernel.params
    plain, lined = cubins
    assert plain != lined
    (symbol,) = kernels(plain)
    assert instructions(plain, symbol) == instructions(lined, symbol)


def test_4_bit_codes_of_fixed_extents_are_counted_in_bytes():
    call = fakes.write(copies, (TENSORS["4 bits"], 1, cutlass.Float32(1)), {})
    assert _arguments(call)["x"]["shape"] == ["s0", 32]


def test_a_symbol_as_an_integer_is_captured_where_it_is_an_extent():
    n, other = cute.sym_int64(), cute.sym_int64()
    y = make_fake_tensor(cutlass.Float32, (n,), (1,))
    assert list(_arguments(fakes.write(sizes, (y, n), {}))) == ["x"]
    with pytest.raises(BuildError, match="size is a 64-bit integer, which a launch cannot take"):
        _arguments(fakes.write(sizes, (y, other), {}))


def test_an_object_of_a_module_that_no_key_would_know_is_a_problem():
    function, arguments = rows.arguments(1)
    function.other = Holder()
    with fusekit.capture() as found:
        compile_here(function, *arguments)
    assert "which the module of tests.examples.cute.rows:SquareSum does not import" in found.problems[0]


def test_problems_stand_in_the_file():
    with fusekit.capture() as found:
        compile_here(*flat(rows.arguments(1)))
        cute.compile[GPUArch("sm_90a"), FrontendNext](*flat(rows.arguments(1)))
    assert "# not captured: SquareSum: " in found.toml()
    assert len(parse_text(found.toml(), "found", "found.toml")) == 1


def test_an_error_of_the_dsl_is_the_callers_and_no_kernel():
    with fusekit.capture() as found, pytest.raises(cutlass.base_dsl.common.DSLBaseError):
        cute.compile(fusion.silu_add, options=ARCH)
    assert not found.kernels
    assert CompileCallable.__call__ is ORIGINAL


def test_an_error_in_the_block_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), fusekit.capture():
        1 / 0  # noqa: B018
    assert CompileCallable.__call__ is ORIGINAL


def test_nested_captures_each_find_what_is_in_them():
    with fusekit.capture() as outer:
        compile_here(*flat(rows.arguments(1)))
        with fusekit.capture() as inner:
            compile_here(*flat(rows.arguments(2)))
        compile_here(*flat(rows.arguments(4)))
    assert [each.params["state"]["cluster"] for each in outer.kernels] == [1, 2, 4]
    assert [each.params["state"]["cluster"] for each in inner.kernels] == [2]


def test_captures_of_several_threads_are_left_in_any_order():
    first, second = fusekit.capture(), fusekit.capture()
    first.__enter__()
    second.__enter__()
    leaving = threading.Thread(target=first.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join()
    compile_here(*flat(rows.arguments(1)))
    second.__exit__(None, None, None)
    assert (len(first.kernels), len(second.kernels)) == (0, 1)
    assert CompileCallable.__call__ is ORIGINAL


def test_one_that_is_open_is_not_opened_again():
    with fusekit.capture() as found, pytest.raises(UsageError, match="open already"), found:
        pass
    assert CompileCallable.__call__ is ORIGINAL


def test_whoever_replaced_the_call_meanwhile_keeps_it(monkeypatch):
    found = fusekit.capture()
    found.__enter__()
    between = CompileCallable.__call__
    monkeypatch.setattr(CompileCallable, "__call__", lambda self, *args, **kwargs: between(self, *args, **kwargs))
    found.__exit__(None, None, None)
    compile_here(*flat(rows.arguments(1)))
    assert not found.kernels
    monkeypatch.undo()
    CompileCallable.__call__ = ORIGINAL


def test_import_of_fusekit_loads_neither():
    code = "import fusekit, sys; print([m for m in sys.modules if m.startswith(('cutlass', 'fusekit.compiler'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    assert {"capture", "compile"} <= set(dir(fusekit))


# -- elsewhere

PROGRAM = """
import hashlib, json, sys, tempfile
import numpy as np
import fusekit
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

def kernels():
    {kernels}

digests = []
with fusekit.capture() as found:
    for function, arguments, options in kernels():
        with tempfile.TemporaryDirectory() as folder:
            options += f" --gpu-arch=sm_90a --keep-cubin --dump-dir={{folder}}"
            made = cute.compile(function, *arguments, options=options)
            digests.append(hashlib.sha256(made.artifacts.CUBIN).hexdigest())
assert not found.problems, found.problems
found.write(sys.argv[1])
print(json.dumps(digests))
"""
OWN = """
    import fusion, gemm, rows
    yield *fusion.arguments(), ""
    yield *rows.arguments(4), ""
    yield *gemm.arguments(), ""
    yield *fusion.arguments(), "--opt-level=1"
    x, y = np.zeros((16, 32), np.float32), np.zeros(16, np.float32)
    yield rows.SquareSum(2), (from_dlpack(x), from_dlpack(y), CUstream(0)), ""
    dynamic = from_dlpack(x, assumed_align=16).mark_compact_shape_dynamic(0, (0, 1), 8)
    yield rows.SquareSum(2), (dynamic, from_dlpack(y).mark_layout_dynamic(), CUstream(0)), ""
"""
QUACK = """
    import cutlass
    from quack.rmsnorm import _compile_rmsnorm_fwd
    from quack.softmax import Softmax
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    original = type(cute.compile).__call__

    def kept(self, *args, options="", **kwargs):  # as QuACK calls it, with its own options, and the cubin kept
        with tempfile.TemporaryDirectory() as folder:
            made = original(self, *args, options=f"{options} --keep-cubin --dump-dir={folder}", **kwargs)
            digests.append(hashlib.sha256(made.artifacts.CUBIN).hexdigest())
        return made

    type(cute.compile).__call__ = kept
    _compile_rmsnorm_fwd.__wrapped__(bf16, bf16, None, f32, None, None, 4096, True, False, False, False)
    Softmax.compile.__wrapped__(bf16, bf16, 2048)
    type(cute.compile).__call__ = original
    yield from ()
"""


def captured_elsewhere(tmp_path, kernels):
    """(digests of what a program compiles, those of what `fusekit build` makes of its capture in another folder)."""
    modules, script, other = (tmp_path / name for name in ("modules", "script", "other"))
    for folder in (modules, script, other):
        folder.mkdir()
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, modules)
    (script / "program.py").write_text(PROGRAM.format(kernels=kernels.strip()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEKIT_", "CUTE_DSL_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(modules), str(ROOT)]),
        "CUTE_DSL_ARCH": "sm_90a",
        "FUSEKIT_STORE": str(tmp_path / "store"),
    }
    file = other / "found.toml"
    done = run([sys.executable, script / "program.py", file], script, environment)
    del environment["CUTE_DSL_ARCH"]
    command = "from fusekit_cli.main import main; main()"
    built = run([sys.executable, "-c", command, "build", "found.toml", "--allow-extern", "--json"], other, environment)
    rows_ = json.loads(built.stdout)["built"]
    return json.loads(done.stdout), [each["cubin_sha256"] for each in rows_]


def run(command, folder, environment):
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_cubins_are_the_same_in_another_process_and_folder(tmp_path):
    compiled, built = captured_elsewhere(tmp_path, OWN)
    assert len(compiled) == 6
    assert built == compiled


def test_quacks_own_functions_are_captured_and_built_to_the_same_cubins(tmp_path):
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    compiled, built = captured_elsewhere(tmp_path, QUACK)
    assert len(compiled) == 2
    assert built == compiled
