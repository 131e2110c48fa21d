"""An operation of another package: a tiny one, installed in a folder of its own."""

import importlib
import sys
import textwrap

import pytest

from fusekit.compiler.families import plan
from fusekit.compiler.identity import Identity
from fusekit.errors import SpecError
from fusekit.spec import family as families
from fusekit.spec import parse_text
from fusekit.store import key_of

OPERATION = '''
"""y = 2 x."""

from dataclasses import dataclass

from fusekit.plan.keys import Key
from fusekit.spec.family import Family
from fusekit.spec.token import TokenProblem, TokenSpec


@dataclass(frozen=True, slots=True)
class DoubleSpec(TokenSpec):
    file: str
    kernel: str
    op: str
    arch: str
    warps: int
    problem: TokenProblem | None
    summary: str

    def defaults(self):
        return {}


def make(file, values, choice):
    return DoubleSpec(file, values["name"], values["op"], choice["arch"], choice["warps"] or 4, None, values["summary"])


def broken(spec):
    return [] if spec.warps < 9 else [("warps", spec.warps, "must be 8 at most")]


KEYS = (
    Key("name", "string", "The name.", required=True),
    Key("summary", "string", "One line."),
    Key("arch", "choice", "Target architecture.", choices=("sm_90a",), required=True, sweep=True),
    Key("warps", "int", "Warps of a block.", minimum=1, sweep=True),
)
FAMILY = Family(("double-it",), KEYS, ("arch", "warps"), make, broken, planner="doubling.kernels")
'''
KERNELS = """
import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute

from fusekit.abi import Dim, TensorArgument
from fusekit.compiler.hostfunction import Signature, token_wise


class Double:
    def __init__(self, warps):
        self.threads = 32 * warps

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        count = x.shape[0]
        self.kernel(x.iterator, y.iterator, count).launch(
            grid=[(count + self.threads - 1) // self.threads, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, count: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        if index < count:
            y[index] = x[index] * cutlass.Float32(2.0)


def plan(spec):
    arguments = tuple(TensorArgument(name, role, "f32", ("T",), (1,), alignment=4)
                      for name, role in (("x", "input"), ("y", "output")))
    signature = Signature(spec.arch, arguments, (Dim("T", maximum=2**30),), skip_if_zero=("T",))
    return token_wise(Double(spec.warps), ("x", "y"), signature)
"""
TEXT = 'schema = 1\n[[kernel]]\nname = "k"\nop = "double-it"\narch = "sm_90a"\nwarps = [2, 4]\n'


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package doubling, and the folder of its code."""
    code = tmp_path / "doubling"
    code.mkdir()
    (code / "__init__.py").write_text("")
    (code / "operation.py").write_text(textwrap.dedent(OPERATION))
    (code / "kernels.py").write_text(textwrap.dedent(KERNELS))
    about = tmp_path / "doubling-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fusekit.operations]\ndouble-it = doubling.operation:FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    families.outside.cache_clear()
    yield code
    families.outside.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "doubling"]:
        del sys.modules[name]


def test_a_spec_of_it_is_read(installed):
    specs = parse_text(TEXT, "s")
    assert [spec.full_name for spec in specs] == ["s/k@w2", "s/k@w4"]
    with pytest.raises(SpecError, match="warps = 16: must be 8 at most"):
        parse_text(TEXT.replace("[2, 4]", "16"), "s")
    with pytest.raises(SpecError, match='there is no such key; did you mean "warps"'):
        parse_text(TEXT + "warp = 1\n", "s")


def test_without_the_package_it_is_unknown():
    with pytest.raises(SpecError, match='op = "double-it": must be'):
        parse_text(TEXT, "s")


def test_a_package_that_cannot_be_imported_is_named(installed):
    (installed / "operation.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(SpecError, match="of the package doubling, which cannot be imported: ModuleNotFoundError"):
        parse_text(TEXT, "s")


def test_an_entry_point_that_gives_something_else_is_named(installed):
    (installed / "operation.py").write_text("FAMILY = 1\n")
    with pytest.raises(SpecError, match="gives 1; it must give a Family"):
        parse_text(TEXT, "s")


def test_its_key_holds_the_whole_package(installed):
    spec = parse_text(TEXT, "s")[0]
    before = Identity().key_fields(spec)
    assert {"source.doubling/kernels.py", "source.doubling/operation.py", "source.abi/arguments.py"} <= before.keys()
    assert "source.compiler/hostfunction.py" in before
    assert not any(label.startswith("source.kernels/") for label in before)
    (installed / "kernels.py").write_text(KERNELS.replace("2.0", "3.0"))
    assert key_of(Identity().key_fields(spec)) != key_of(before)


def test_it_is_compiled_and_proven(installed, tmp_path):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.trace import compile_plan

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    compiled = compile_plan(plan(parse_text(TEXT, "s")[0]), scratch)
    assert [argument["name"] for argument in compiled.launch["arguments"]] == ["x", "y"]
    assert compiled.resources["max_threads"] == 64
