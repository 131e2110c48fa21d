"""Which sources and which toolchain a key is made of."""

import dataclasses
import subprocess
import sys
from importlib import metadata

import pytest

from fusekit.compiler.identity import Identity, key_fields_for
from fusekit.compiler.sources import closure
from fusekit.compiler.toolchain import describe, distributions
from fusekit.errors import BuildError, ToolchainError
from fusekit.spec import find
from fusekit.store import key_of

SPEC = find(["quickstart/linear"])[0]


@pytest.fixture
def package(tmp_path):
    """A package of the same shape as fusekit: a family module, device code, and rooms that are not followed."""
    files = {
        "__init__.py": "",
        "compiler/__init__.py": "",
        "compiler/gemm.py": "from fusekit.compiler.hostfunction import TracePlan\n"
        "from fusekit.spec.model import KernelSpec\ndef plan(spec):\n    from fusekit.kernels.gemm import Gemm\n",
        "compiler/hostfunction.py": "import json\n",
        "compiler/other.py": "import fusekit.compiler.hostfunction\n",
        "kernels/__init__.py": "",
        "kernels/gemm.py": "import cutlass\nfrom fusekit.kernels import ptx\nfrom . import scheduler as s\n",
        "kernels/ptx.py": "import math\n",
        "kernels/scheduler.py": "from cutlass import cute\nfrom .ptx import add\n",
        "kernels/unused.py": "",
        "spec/__init__.py": "from fusekit.spec.parse import parse\n",
        "spec/model.py": "",
        "spec/parse.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "fusekit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "fusekit"


def test_the_closure_is_what_the_family_imports(package):
    assert list(closure("fusekit.compiler.gemm", package)) == [
        "compiler/__init__.py",
        "compiler/gemm.py",
        "compiler/hostfunction.py",
        "kernels/__init__.py",
        "kernels/gemm.py",
        "kernels/ptx.py",
        "kernels/scheduler.py",
        "spec/model.py",
    ]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("kernels/scheduler.py", True),
        ("kernels/__init__.py", True),
        ("spec/model.py", True),
        ("kernels/unused.py", False),
        ("spec/__init__.py", False),
        ("spec/parse.py", False),
        ("compiler/other.py", False),
    ],
)
def test_an_edit_counts_where_the_file_takes_part(package, name, counts):
    before = closure("fusekit.compiler.gemm", package)
    (package / name).write_text("edited = 1\n")
    assert (closure("fusekit.compiler.gemm", package) != before) is counts


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import numpy\n", "numpy"),
        ("def f():\n    from quack import gemm\n", "quack"),
        ("import importlib\n", "importlib"),
        ("from importlib import import_module\n", "importlib"),
        ("x = __import__('os')\n", "__import__"),
    ],
)
def test_a_source_that_no_key_can_name_is_refused(package, text, what):
    (package / "kernels" / "ptx.py").write_text(text)
    with pytest.raises(BuildError, match=f"ptx.py imports {what}.*whose source no key can name"):
        closure("fusekit.compiler.gemm", package)


def test_a_syntax_error_is_named(package):
    (package / "kernels" / "ptx.py").write_text("def (:\n")
    with pytest.raises(BuildError, match=r"ptx\.py"):
        closure("fusekit.compiler.gemm", package)


def test_the_real_closure_holds_the_kernel_and_no_more():
    names = closure("fusekit.compiler.gemm", modules=SPEC.plan.modules)
    assert {"compiler/gemm.py", "compiler/hostfunction.py", "plan/gemm.py", "spec/model.py"} <= set(names)
    kernels = {"sm90/kernel.py", "sm90/forward.py", "operands/bias.py", "operands/product.py", "maths.py"}
    assert {f"kernels/gemm/{name}" for name in kernels} <= set(names)
    others = {"sm90/backward.py", "sm90/wgrad.py", "operands/alpha.py", "operands/dprob.py", "operands/column_sums.py"}
    assert not {f"kernels/gemm/{name}" for name in others} & set(names)
    assert "plan/activations/gelu.py" in names
    assert not {"plan/activations/swiglu.py", "plan/operands/dprob.py", "plan/tiles.py"} & set(names)
    assert not {"compiler/build.py", "compiler/prove.py", "store/store.py", "errors.py"} & set(names)


def test_of_the_specs_only_what_a_family_reads_is_in_its_closure():
    def of_specs(root, modules=()):
        return {name for name in closure(root, modules=modules) if name.startswith("spec/")}

    assert of_specs("fusekit.compiler.tokens") == set()  # what comes of them is in the spec
    assert of_specs("fusekit.compiler.gemm", SPEC.plan.modules) == {"spec/model.py"}


def test_every_distribution_of_the_dsl_is_named():
    result = distributions()
    assert result["nvidia-cutlass-dsl"] == metadata.version("nvidia-cutlass-dsl")
    assert any("libs" in name for name in result)
    assert all(name.startswith("nvidia-cutlass-dsl") for name in result)
    assert describe(result)["distributions"] == result


def test_a_missing_dsl_is_a_toolchain_error(monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    with pytest.raises(ToolchainError, match=r"pip install 'llvmlite"):
        distributions()


def test_names_and_run_time_scalars_do_not_change_the_key():
    key = key_of(key_fields_for(SPEC))
    same = dataclasses.replace(SPEC, file="other", kernel="name", cluster_margin=7, problem=None, summary="x")
    assert key_of(key_fields_for(same)) == key


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp16"},
        {"out_dtype": "fp16"},
        {"b_major": "n"},
        {"operands": SPEC.operands | {"alpha": "scalar"}},
        {"operands": SPEC.operands | {"row_scale": True}},
        {"operands": SPEC.operands | {"save_preactivation": True}},
        {"tile": (64, 128)},
        {"cluster": (1, 1)},
        {"op": "grouped-gemm"},
    ],
)
def test_what_decides_the_cubin_changes_the_key(change):
    assert key_of(key_fields_for(dataclasses.replace(SPEC, **change))) != key_of(key_fields_for(SPEC))


def test_an_unknown_op_is_refused():
    with pytest.raises(
        BuildError,
        match="op 'convolution' has no kernels; it must be one of dense-gemm, dense-wgrad, extern, grouped-gemm, ",
    ):
        Identity().key_fields(dataclasses.replace(SPEC, op="convolution"))


def test_keys_need_no_compiler():
    code = (
        "import sys; from fusekit.compiler.identity import key_fields_for; from fusekit.spec import find;"
        "key_fields_for(find(['quickstart/linear'])[0]);"
        "assert not {'cutlass', 'llvmlite', 'numpy', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
