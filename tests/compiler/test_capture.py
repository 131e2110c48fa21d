"""What code compiles with the CuTe DSL, listened to: `fusekit.capture`."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fusekit
from fusekit.errors import SpecError, UsageError
from fusekit.spec.parse import parse_text

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.base_dsl.compiler import CompileCallable, FrontendNext, GPUArch, OptLevel
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.runtime import from_dlpack, make_fake_tensor
from cutlass.cutlass_dsl import CuTeDSL

from examples.cute import fusion, rows
from fusekit.compiler import fakes
from fusekit.compiler.capture import tables_of
from fusekit.compiler.cubin import kernels
from fusekit.compiler.leaves import leaves
from tests.compiler.sass import instructions

ROOT = Path(__file__).parents[2]
ARCH = "--gpu-arch=sm_90a"
ORIGINAL, FUNCTION = CompileCallable.__call__, BaseDSL._func


def compile_here(function, *args, options=ARCH):
    return cute.compile(function, *args, options=options)


class Holder:
    pass


@cute.jit
def copies(x: cute.Tensor, n: cutlass.Constexpr, scale: cutlass.Float32):
    rows.SquareSum(n)


def test_the_call_does_what_it_does_and_nothing_is_left_behind():
    with fusekit.capture() as result:
        compiled = compile_here(*flat(fusion.arguments()))
    assert callable(compiled)
    assert CompileCallable.__call__ is ORIGINAL
    (kernel,) = result.kernels
    assert (kernel.name, kernel.arch, kernel.source) == ("silu_add", "sm_90a", "examples.cute.fusion:silu_add")
    compile_here(*flat(fusion.arguments()))
    assert len(result.kernels) == 1


def flat(built):
    return built[0], *built[1]


def test_options_in_brackets_and_other_ways_to_call_are_found_too():
    from cutlass.cute import compile as compile_it

    with fusekit.capture() as result:
        compile_it(*flat(rows.arguments(1)), options=ARCH)
        cute.compile[OptLevel(2), GPUArch("sm_90a")](*flat(rows.arguments(1)))
        function, arguments = rows.arguments(1)
        compile_it(function.__call__, *arguments, options=ARCH + " --opt-level=2")
    first, second, third = result.kernels
    assert [kernel.name for kernel in result.kernels] == ["squaresum", "squaresum-2", "squaresum-3"]
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
    x, residual, y = (from_dlpack(item, assumed_align=16).mark_layout_dynamic() for item in held)
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
    with fusekit.capture() as result:
        compile_here(*flat(fusion.arguments()))
    with pytest.raises(UsageError, match=r"a spec file is NAME\.toml.*; a name is lower-case"):
        result.write(tmp_path / name)
    assert not list(tmp_path.iterdir()) and result.write(tmp_path / "found.toml").is_file()


def test_the_same_thing_is_found_once_and_text_is_a_spec_file():
    with fusekit.capture() as result:
        for cluster in (1, 2, 1):
            compile_here(*flat(rows.arguments(cluster)))
    specs = parse_text(result.toml(), "found", "found.toml")
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
    with fusekit.capture() as result:
        assert compile_here(inside(), fake) is not None
        cute.compile[GPUArch("sm_90a"), FrontendNext](*flat(rows.arguments(1)))
    assert not result.kernels
    first, second = result.problems
    assert "made inside a function" in first
    assert "which a spec cannot say" in second
    with pytest.raises(SpecError, match=r"no kernel was captured: .*made inside a function"):
        result.toml()
    with fusekit.capture() as nothing:
        pass
    with pytest.raises(SpecError, match="nothing was compiled"):
        nothing.write("nothing.toml")


def test_line_information_is_left_out_and_changes_no_instruction(tmp_path):
    cubins = []
    with fusekit.capture() as result:
        for extra in ("", " --generate-line-info"):
            options = f"{ARCH} --keep-cubin --dump-dir={tmp_path}{extra}"
            cubins.append(compile_here(*flat(rows.arguments(1)), options=options).artifacts.CUBIN)
    (kernel,) = result.kernels
    assert "options" not in kernel.params
    plain, lined = cubins
    assert plain != lined
    (symbol,) = kernels(plain)
    assert instructions(plain, symbol) == instructions(lined, symbol)


def test_4_bit_values_of_fixed_extents_are_counted_in_bytes():
    narrow = make_fake_tensor(cutlass.Float4E2M1FN, (cute.sym_int(), 64), (64, 1), assumed_align=16)
    call = fakes.write(copies, (narrow, 1, cutlass.Float32(1)), {})
    assert tables_of(leaves(*fakes.read(call.source, call.params)))["x"]["shape"] == ["s0", 32]


def test_an_object_of_a_module_that_no_key_would_know_is_a_problem():
    function, arguments = rows.arguments(1)
    function.other = Holder()
    with fusekit.capture() as result:
        compile_here(function, *arguments)
    assert "which the module of examples.cute.rows:SquareSum does not import" in result.problems[0]


def test_problems_are_in_the_file():
    with fusekit.capture() as result:
        compile_here(*flat(rows.arguments(1)))
        cute.compile[GPUArch("sm_90a"), FrontendNext](*flat(rows.arguments(1)))
    assert "# not captured: SquareSum: " in result.toml()
    assert len(parse_text(result.toml(), "found", "found.toml")) == 1


def test_an_error_of_the_dsl_is_the_callers_and_no_kernel():
    with fusekit.capture() as result, pytest.raises(cutlass.base_dsl.common.DSLBaseError):
        cute.compile(fusion.silu_add, options=ARCH)
    assert not result.kernels
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
    assert [kernel.params["state"]["cluster"] for kernel in outer.kernels] == [1, 2, 4]
    assert [kernel.params["state"]["cluster"] for kernel in inner.kernels] == [2]


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
    with fusekit.capture() as result, pytest.raises(UsageError, match="open already"), result:
        pass
    assert CompileCallable.__call__ is ORIGINAL


def test_whoever_replaced_the_call_meanwhile_keeps_it(monkeypatch):
    result = fusekit.capture()
    result.__enter__()
    between = CompileCallable.__call__
    monkeypatch.setattr(CompileCallable, "__call__", lambda self, *args, **kwargs: between(self, *args, **kwargs))
    result.__exit__(None, None, None)
    compile_here(*flat(rows.arguments(1)))
    assert not result.kernels
    monkeypatch.undo()
    CompileCallable.__call__ = ORIGINAL


def test_import_of_fusekit_loads_neither():
    code = "import fusekit, sys; print([m for m in sys.modules if m.startswith(('cutlass', 'fusekit.compiler'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    assert {"capture", "compile"} <= set(dir(fusekit))
