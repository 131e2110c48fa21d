"""`fusekit.compile`: the cache of `fusekit exec` for one call."""

import sys
import threading

import pytest

import fusekit
from fusekit.errors import NotBuiltError, ToolchainError

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fusekit.store import Store
from tests.cute import kernels
from tests.cute.rig import HIT, Rig

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("FUSEKIT_STORES", "FUSEKIT_MISS", "FUSEKIT_REMOTE", "FUSEKIT_EXEC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def compile_kernel():
    return fusekit.compile(kernels.Kernel(), kernels.fake())


def test_it_stores_what_a_program_under_exec_finds(root, tmp_path, monkeypatch):
    compiled = compile_kernel()
    assert isinstance(compiled, cutlass.cutlass_dsl.cuda_jit_executor.CudaDialectJitCompiledFunction)
    ((name, _),) = Store(root).recorded()
    assert name.startswith("tests/Kernel@")
    assert Rig(root, tmp_path / "report").counted() == HIT
    monkeypatch.setenv("FUSEKIT_MISS", "error")
    again = compile_kernel()
    assert again.fusekit_ir is not None
    with pytest.raises(NotBuiltError, match="would be compiled"):
        fusekit.compile(kernels.Kernel(), kernels.fake(64))


def test_calls_of_other_code_and_threads_are_the_dsls(root, monkeypatch):
    monkeypatch.setenv("FUSEKIT_MISS", "error")
    with pytest.raises(NotBuiltError):
        compile_kernel()
    assert not hasattr(kernels.compile_kernel(), "fusekit_ir")
    results = []
    inside = CutlassBaseDSL.compile_and_cache.fusekit_cute
    assert inside.cache is None
    with inside.here(object()):
        thread = threading.Thread(target=lambda: results.append(inside.cache))
        thread.start()
        thread.join()
    assert results == [None]


def test_what_no_other_process_could_import_is_served(root):
    """A function of a function, which has a value of its own."""
    bias = 3

    @cute.kernel
    def add(x: cute.Tensor):
        x[0] = x[0] + bias

    @cute.jit
    def own(x: cute.Tensor):
        add(x).launch(grid=(1, 1, 1), block=(1, 1, 1))

    fusekit.compile(own, kernels.fake())
    assert hasattr(fusekit.compile(own, kernels.fake()), "fusekit_ir")
    bias = 4
    assert not hasattr(fusekit.compile(own, kernels.fake()), "fusekit_ir")


def test_a_store_that_cannot_be_used_leaves_it_to_the_dsl(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / "file" / "store"))
    assert compile_kernel() is not None


def test_without_the_dsl_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ToolchainError, match=r"pip install 'llvmlite"):
        fusekit.compile(print)
