"""Keys hold every source that reaches the cubin: each is changed in turn, and so is what must not count."""

import ast
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.compiler.identity import roots_of
from fusekit.compiler.sources import Parsed, Sources, closure
from fusekit.compiler.worker import alone
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import Quant
from fusekit.plan.tokens import TOKENS
from fusekit.spec import KernelSpec, find
from tests.compiler.keyed import EACH, PACKAGE, SOURCES, SPEC, key
from tests.soak import sample


def own_modules(spec):
    """What the spec's plan names, or the operation's row."""
    return roots_of(spec)[1:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package somewhere else."""
    place = tmp_path_factory.mktemp("elsewhere") / "fusekit"
    shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


# What a compile process loads of fusekit and no key holds, with the reason.
NO_SOURCE = {
    "fusekit": "the package's list of names",
    "fusekit.spec": "the package's list of names",
    "fusekit.errors": "messages",
    "fusekit.compiler.prove": "compares a launch record with the host code, and changes neither",
    "fusekit.compiler.recorder": "for the proof",
    "fusekit.compiler.hostcall": "for the proof",
    "fusekit.compiler.samples": "for the proof",
    "fusekit.abi.tensormap": "for the proof",
    "fusekit.plan.exchange": "the window of a rank: kernels that have one import it, and their keys hold it",
    "fusekit.plan.tokens": "facts of operations that work token by token: a spec has its own",
    "fusekit.plan.token_operation": "the form of those facts",
    "fusekit.spec.fields": "how a file is read: what comes of it stands in the spec",
    "fusekit.plan.tiles": "which specs are refused",
    "fusekit.plan.operations": "facts of all operations: what reaches a kernel stands in its spec",
    "fusekit.spec.token": "names and forms of a spec",
    "fusekit.spec.permutation": "names and forms of a spec",
    "fusekit.spec.router": "names and forms of a spec",
}  # fmt: skip
COMPILE = """
import json, pickle, sys, tempfile
from pathlib import Path
spec = pickle.loads(bytes.fromhex(sys.argv[1]))
from fusekit.plan.operations import operation
from fusekit.compiler.trace import compile_plan
plan = operation(spec.op).load("planner")
with tempfile.TemporaryDirectory() as scratch:
    compile_plan(plan(spec), Path(scratch))
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
json.dump({name: file for name, file in files.items() if name.partition(".")[0] == "fusekit"}, sys.stdout)
"""


# Every operand and activation is loaded with the table of them; a key holds those that the kernel has. Of GEMMs alone,
# as are the values of their specs.
TABLES = ("fusekit.plan.operands.", "fusekit.plan.activations.")
OF_GEMMS = ("fusekit.plan", "fusekit.spec.model")


@EACH
def test_what_is_loaded_while_a_kernel_is_compiled_is_in_its_key(spec):
    """By construction: every module of fusekit that the process has in the end counts, or is in the list above."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    run = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, pickle.dumps(alone(spec)).hex()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    covered = SOURCES.closure(roots_of(spec))
    loaded = {name: Path(file).relative_to(PACKAGE).as_posix() for name, file in json.loads(run.stdout).items() if file}
    assert {"fusekit.compiler.trace", *roots_of(spec), "fusekit.abi.record"} <= loaded.keys()
    others = {name for name, file in loaded.items() if file not in covered} - NO_SOURCE.keys()
    tables = TABLES if isinstance(spec, KernelSpec) else OF_GEMMS
    others = {name for name in others if not name.startswith(tables)}
    assert not others, "these take part in a compile and are in no key"


def test_what_calls_the_compiler_is_an_input_of_every_kernel():
    for root in {row.planner for row in OPERATIONS.values()}:
        followed = SOURCES.closure([root]).keys()
        assert {"compiler/trace.py", "compiler/options.py", "compiler/cubin.py", "abi/record.py"} <= followed
        assert {f"compiler/hostcode/{name}.py" for name in ("reader", "machine", "terms")} <= followed
    for file in ("permutation", "router", "exchange"):
        for spec in find([file]):
            followed = SOURCES.closure(roots_of(spec))
            assert sum(name.startswith(f"kernels/{file}/") for name in followed) > 1


@EACH
def test_every_source_file(copy, spec):
    """Each file of the kernel counts, with every statement; no other file does."""
    roots, sources = roots_of(spec), Sources(copy)
    before = sources.closure(roots)
    assert SOURCES.closure(roots) == before
    assert any(name.startswith("kernels/") for name in before)
    others = [path for path in sorted(copy.rglob("*.py")) if path.relative_to(copy).as_posix() not in before]
    kept = {path: path.read_bytes() for path in others}
    for path, data in kept.items():
        path.write_bytes(data + b"\nedited = 1\n")
    assert Sources(copy).closure(roots) == before
    for path, data in kept.items():
        path.write_bytes(data)
    for name in before:
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data + b"\nedited = 1\n")
        others = {item: file for item, file in sources._files.items() if item != name}
        assert Sources(copy, others).closure(roots) != before, name
        (copy / name).write_bytes(data)


@EACH
def test_what_is_for_people_is_no_input(copy, spec):
    """Comments, blank lines, docstrings and messages of every file; a key of no kernel holds them."""
    before = Sources(copy).closure(roots_of(spec))
    kept = {name: (copy / name).read_text() for name in before}
    for name, text in kept.items():
        (copy / name).write_text(reworded(text))
    assert Sources(copy).closure(roots_of(spec)) == before
    for name, text in kept.items():
        (copy / name).write_text(text)


@EACH
def test_how_a_source_is_written_down_is_no_input(copy, spec):
    """The same syntax tree in lines of other lengths, with other quotes and brackets."""
    before = Sources(copy).closure(roots_of(spec))
    kept = {name: (copy / name).read_text() for name in before}
    for name, text in kept.items():
        (copy / name).write_text(ast.unparse(ast.parse(text)))
    assert Sources(copy).closure(roots_of(spec)) == before
    for name, text in kept.items():
        (copy / name).write_text(text)


def test_what_was_parsed_is_kept_by_its_text(tmp_path, monkeypatch):
    folder, (spec,) = tmp_path / "cache", find(["quickstart/linear"])
    folder.mkdir()
    before = Sources(parsed=Parsed(folder)).closure(roots_of(spec))
    (kept,) = folder.iterdir()
    rows = json.loads(kept.read_text())
    assert len(rows) == len(before)
    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", None)  # fails when it is called
        assert Sources(parsed=Parsed(folder)).closure(roots_of(spec)) == before
    for damaged in ("", "[]", '{"a": 1}', json.dumps({name: [] for name in rows})):
        kept.write_text(damaged)
        assert Sources(parsed=Parsed(folder)).closure(roots_of(spec)) == before
    known = Parsed(folder)
    assert known("plan/x.py", b"SIZE = 4") == known("plan/x.py", b"SIZE = 4  # tiles")
    assert known("plan/x.py", b"SIZE = 4") != known("plan/x.py", b"SIZE = 8")


def reworded(text):
    """The same code with another docstring, other messages and a comment after each statement that has room."""
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1] = lines[node.lineno - 1].replace('"""', '"""Other words. ', 1)
        elif isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.lineno == node.lineno:
                    lines[node.lineno - 1] = (
                        lines[node.lineno - 1].replace('("', '("so: ', 1).replace('(f"', '(f"so: ', 1)
                    )
                    break
    assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(tree) or "def " not in text
    return "# Another comment.\n\n" + "\n\n\n".join(["\n".join(lines), "# and more"]) + "\n"


def edited(copy, name, before, after):
    """The packaged GEMMs, and those of them whose sources change when a text of a file does."""
    specs = [spec for spec in find([]) if isinstance(spec, KernelSpec)]
    sources = Sources(copy)
    old = [sources.closure(roots_of(spec)) for spec in specs]
    path = copy / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    sources = Sources(copy)
    changed = [spec for spec, was in zip(specs, old, strict=True) if sources.closure(roots_of(spec)) != was]
    path.write_text(text)
    return specs, changed


@pytest.mark.parametrize(
    ("name", "before", "after", "has"),
    sample([
        ("plan/operands/bias.py", "it has no epilogue", "there is no epilogue", None),
        ("plan/operands/bias.py", '"Adds bias[E, N]."', '"Adds a bias."', None),
        ("plan/operands/row_scale.py", "has no right gradient", "has a wrong gradient", None),
        ("plan/tiles.py", "take a smaller tile", "try a smaller tile", None),
        ("plan/operands/bias.py", "* 4, 4)", "* 4, 16)", lambda spec: spec.operands["bias"]),
        ("kernels/gemm/operands/bias.py", "chunk * 8", "chunk * 9",
         # Scales of w are columns, too.
         lambda spec: spec.operands["bias"] or (spec.quant != Quant() and "wgrad" not in spec.op)),
        ("plan/activations/swiglu.py", "value * shifted, *", "shifted * value, *",
         lambda spec: spec.activation.function == "swiglu"),
        ("kernels/gemm/operands/dbias.py", "NO_TILE = -1", "NO_TILE = -2",
         lambda spec: spec.epilogue == "backward" and spec.plan.has("dbias")),
        ("kernels/gemm/sm90/wgrad.py", "first < rows", "first <= rows", lambda spec: spec.epilogue == "wgrad"),
        ("kernels/gemm/sm90/backward.py", "depth) & 1", "depth) & 3", lambda spec: spec.epilogue == "backward"),
        ("plan/gemm.py", "SCHEDULE_BYTES = 8", "SCHEDULE_BYTES = 16", lambda spec: True),
        ("plan/arch/sm_90a.py", "registers=65536", "registers=65537", lambda spec: spec.arch == "sm_90a"),
    ], most=4),
)  # fmt: skip
def test_an_edit_reaches_the_kernels_that_use_it(copy, name, before, after, has):
    specs, changed = edited(copy, name, before, after)
    assert {spec.full_name for spec in changed} == {spec.full_name for spec in specs if has and has(spec)}


def test_a_new_activation_operand_or_architecture_changes_no_key(copy):
    """Their files are read when a kernel asks for them."""
    specs = [spec for spec in find([]) if isinstance(spec, KernelSpec)]
    sources = Sources(copy)
    old = [sources.closure(roots_of(spec)) for spec in specs]
    files = [copy / "plan" / name for name in ("activations/mish.py", "operands/mask.py", "arch/sm_100a.py")]
    for path in files:
        path.write_text("def value(m, z):\n    return z\n")
    sources = Sources(copy)
    assert [sources.closure(roots_of(spec)) for spec in specs] == old
    for path in files:
        path.unlink()


def test_words_and_other_operations_change_no_key_of_a_token_operation(monkeypatch):
    """A key holds what is made of a row: who is passed, in which order, of which type and shape."""
    specs = find(["router", "permutation"])
    old = [key(spec) for spec in specs]
    for name, row in TOKENS.items():
        reworded = tuple(dataclasses.replace(operand, words="Other words.") for operand in row.operands)
        monkeypatch.setitem(TOKENS, name, dataclasses.replace(row, operands=reworded))
    assert [key(spec) for spec in specs] == old
    for change in ({"role": "inout"}, {"dtype": "fp16"}, {"shape": "T 7"}, {"name": "other"}, {"when": lambda keys: 0}):
        row = TOKENS["moe-permute"]
        changed = (dataclasses.replace(row.operands[0], **change), *row.operands[1:])
        monkeypatch.setitem(TOKENS, row.name, dataclasses.replace(row, operands=changed))
        changes = [key(spec) != was for spec, was in zip(specs, old, strict=True)]
        assert changes == [spec.op == row.name for spec in specs]
        monkeypatch.setitem(TOKENS, row.name, row)


def test_an_unrelated_kernel_is_no_input(copy):
    root = OPERATIONS[SPEC.op].planner
    before = closure(root, copy)
    new = copy / "kernels" / "somebody_elses.py"
    new.write_text("import cutlass\n")
    assert closure(root, copy) == before
    new.unlink()


def test_stamps_and_modes_of_sources_are_no_inputs(copy):
    root = OPERATIONS[SPEC.op].planner
    before = closure(root, copy)
    for path in copy.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    assert closure(root, copy) == before
