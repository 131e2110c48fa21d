"""Keys are complete and stable: every input is changed in turn, and so is everything that must not count."""

import ast
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import fusekit
from fusekit.compiler import identity, toolchain
from fusekit.compiler.families import family, modules
from fusekit.compiler.identity import Identity
from fusekit.compiler.sources import Sources, closure
from fusekit.compiler.worker import alone
from fusekit.errors import ToolchainError
from fusekit.plan.arch import ARCHITECTURES
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.tokens import TOKENS
from fusekit.spec import KernelSpec, find
from fusekit.store import key_of, keys

SPEC = find(["quickstart/linear"])[0]
PACKAGE = Path(fusekit.__file__).parent

# Fields of a spec that reach no cubin: names, run-time scalars, what `run` takes by default, text for people.
NO_INPUT = {
    "file": "other",
    "kernel": "other",
    "cluster_margin": 3,
    "problem": None,
    "summary": "another text",
    "layer": "of which it is a part",
}
# Another value of each field that does, such that the kernel can still be sized.
INPUT = {
    "op": "grouped-gemm",
    "arch": "sm_100a",
    "dtype": "fp16",
    "out_dtype": "fp16",
    "b_major": "n",
    "alpha": "scalar",
    "bias": not SPEC.bias,
    "save_preactivation": not SPEC.save_preactivation,
    "activation": dataclasses.replace(SPEC.activation, kind="relu"),
    "glu_layout": "concat",
    "row_scale": not SPEC.row_scale,
    "quant": "in=fp8-row",
    "tile": (64, 128),
    "cluster": (1, 1),
    "mainloop": "cooperative",
    "schedule": "dynamic" if SPEC.schedule == "static" else "static",
}


def own_modules(spec):
    """What the spec's plan names, or the operation's row."""
    return modules(spec)


def roots_of(spec):
    return family(spec), *own_modules(spec)


def one_of_each():
    """A kernel of every family, and of every epilogue."""
    found = {}
    for spec in find([]):
        if spec.op != "extern":
            found.setdefault((family(spec), getattr(spec, "epilogue", "")), spec)
    return list(found.values())


EACH = pytest.mark.parametrize("spec", one_of_each(), ids=lambda spec: spec.full_name)


SOURCES = Sources()  # as they are; tests that change one have a copy


def key(spec=SPEC):
    return key_of(Identity(sources=SOURCES).key_fields(spec))


def other(value):
    """Another value of a type that this file does not know yet."""
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KernelSpec)])
def test_every_field_of_a_spec(name, monkeypatch):
    """A field is an input of the cubin unless it is in the list of those that are not."""
    row = dataclasses.replace(ARCHITECTURES["sm_90a"], name="sm_100a")
    monkeypatch.setitem(ARCHITECTURES, "sm_100a", row)
    if name in NO_INPUT:
        assert key(dataclasses.replace(SPEC, **{name: NO_INPUT[name]})) == key()
    else:
        changed = dataclasses.replace(SPEC, **{name: INPUT.get(name) or other(getattr(SPEC, name))})
        assert key(changed) != key()


def test_every_part_of_an_activation():
    """kind and approximate are compiled in; the scalars are given at launch."""
    for name, value in (("kind", "silu"), ("approximate", "none"), ("alpha", 2.0), ("limit", 7.0), ("up_offset", 1.0)):
        activation = dataclasses.replace(SPEC.activation, **{name: value})
        assert activation != SPEC.activation
        changed = key(dataclasses.replace(SPEC, activation=activation)) != key()
        assert changed is (name in ("kind", "approximate")), name


class Distribution:
    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version


@pytest.fixture
def installed(monkeypatch):
    """What is installed, as a dict that a test may change."""
    found = {each.name: each.version for each in metadata.distributions() if each.name}

    def distributions():
        return iter(Distribution(name, version) for name, version in found.items())

    monkeypatch.setattr(toolchain.metadata, "distributions", distributions)
    return found


def test_every_distribution_of_the_toolchain(installed):
    before = key()
    family = [name for name in installed if name.lower().replace("_", "-").startswith("nvidia-cutlass-dsl")]
    assert len(family) > 1
    for name in family:
        version = installed[name]
        installed[name] = version + ".post1"
        assert key() != before, name
        installed[name] = version
        if name.lower().replace("_", "-") != "nvidia-cutlass-dsl":
            del installed[name]
            assert key() != before, name
            installed[name] = version
    installed["nvidia-cutlass-dsl-libs-cu99"] = "1.0"
    assert key() != before


@pytest.mark.parametrize(
    ("driver", "taken"), [(None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")], ids=["no driver", "12", "13", "14"]
)
def test_of_two_cuda_libraries_the_one_that_the_dsl_loads(installed, monkeypatch, driver, taken):
    """The newest that the driver supports, as the DSL's own loader has it; the other one is no input."""
    names = {f"nvidia-cutlass-dsl-libs-{each}" for each in ("cu12", "cu13")}
    installed.update(dict.fromkeys(names, "4.8.1"))
    monkeypatch.setattr(toolchain, "_driver_major", lambda: driver)
    both = key()
    assert names & toolchain.distributions().keys() == {f"nvidia-cutlass-dsl-libs-{taken}"}
    (other,) = names - {f"nvidia-cutlass-dsl-libs-{taken}"}
    del installed[other]
    assert key() == both
    installed[other] = installed.pop(f"nvidia-cutlass-dsl-libs-{taken}")
    assert key() != both


def test_no_cuda_library_for_the_driver(installed, monkeypatch):
    installed.update(dict.fromkeys(("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"), "4.8.1"))
    monkeypatch.setattr(toolchain, "_driver_major", lambda: 11)
    with pytest.raises(ToolchainError, match=r"libraries for cu12, cu13, and the driver here supports CUDA 11"):
        key()


def test_another_library_than_the_key_names_is_refused(monkeypatch):
    loaded = SimpleNamespace(__file__="/site/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so")
    monkeypatch.setitem(sys.modules, "cutlass._mlir._mlir_libs._cutlass_ir", loaded)
    named = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}
    toolchain.check_loaded(named)
    named["nvidia-cutlass-dsl-libs-cu12"] = named.pop("nvidia-cutlass-dsl-libs-cu13")
    with pytest.raises(ToolchainError, match="has loaded its library of CUDA 13"):
        toolchain.check_loaded(named)


def test_no_other_distribution(installed):
    before = key()
    installed["numpy"] = "99.0"
    installed["nvidia-cutlass"] = "99.0"
    reordered = dict(reversed(installed.items()))
    installed.clear()
    installed.update(reordered)
    assert key() == before


def test_options_and_schema(monkeypatch):
    before = key()
    real = identity.compile_options
    monkeypatch.setattr(identity, "compile_options", lambda arch: real(arch) + " --opt-level=2")
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(keys, "SCHEMA", keys.SCHEMA + 1)
    assert key() != before


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
    "fusekit.compiler.families": "says which module builds an operation: a key holds that module",
    "fusekit.compiler.prove": "compares a launch record with the host code, and changes neither",
    "fusekit.compiler.recorder": "for the proof",
    "fusekit.compiler.hostcall": "for the proof",
    "fusekit.compiler.samples": "for the proof",
    "fusekit.abi.tensormap": "for the proof",
    "fusekit.plan.exchange": "the window of a rank: kernels that have one import it, and their keys hold it",
    "fusekit.plan.tokens": "facts of operations that work token by token: a spec has its own",
    "fusekit.plan.token_operation": "the form of those facts",
    "fusekit.spec.keys": "how a file is read: what comes of it stands in the spec",
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
from fusekit.compiler.families import plan
from fusekit.compiler.trace import compile_plan
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
    """By construction: every module of fusekit that the process has in the end counts, or stands in the list above."""
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
        others = {each: file for each, file in sources._files.items() if each != name}
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


def reworded(text):
    """The same code with another docstring, other messages and a comment behind each statement that has room."""
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
    [
        ("plan/operands/bias.py", "it has no epilogue", "there is no epilogue", None),
        ("plan/operands/bias.py", '"Adds bias[E, N]."', '"Adds a bias."', None),
        ("plan/operands/row_scale.py", "has no right gradient", "has a wrong gradient", None),
        ("plan/tiles.py", "take a smaller tile", "try a smaller tile", None),
        ("plan/operands/bias.py", "* 4, 4)", "* 4, 16)", lambda spec: spec.bias),
        ("kernels/gemm/operands/bias.py", "warpgroup + 3", "warpgroup + 5",
         lambda spec: spec.bias or (spec.quant != "none" and "wgrad" not in spec.op)),  # scales of w are columns, too
        ("plan/activations/swiglu.py", "value * shifted, *", "shifted * value, *",
         lambda spec: spec.activation.function == "swiglu"),
        ("kernels/gemm/operands/dbias.py", "PARTS_AT_ONCE = 4", "PARTS_AT_ONCE = 8",
         lambda spec: spec.epilogue == "backward" and spec.dbias),
        ("kernels/gemm/sm90/wgrad.py", "first < rows", "first <= rows", lambda spec: spec.epilogue == "wgrad"),
        ("kernels/gemm/sm90/backward.py", "depth) & 1", "depth) & 3", lambda spec: spec.epilogue == "backward"),
        ("plan/gemm.py", "RESERVED_BYTES = 2304", "RESERVED_BYTES = 2305", lambda spec: True),
        ("plan/arch/sm_90a.py", "registers=65536", "registers=65537", lambda spec: spec.arch == "sm_90a"),
    ],
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
        reworded = tuple(dataclasses.replace(each, words="Other words.") for each in row.operands)
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


CODE = """
import json, sys
from fusekit.compiler.identity import Identity
from fusekit.spec import find
from fusekit.store import key_of
identity = Identity()
json.dump({f"{s.full_name} {s.arch}": key_of(identity.key_fields(s)) for s in find([]) if s.op != "extern"}, sys.stdout)
"""


def keys_in(folder, package, **environment):
    """The keys of every packaged spec, in a process of its own."""
    paths = [str(package.parent), *sys.path]
    code = f"import sys; sys.path[:] = {paths!r}\n" + CODE
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)} | environment,
        capture_output=True,
        check=True,
    )
    return json.loads(run.stdout)


def test_nothing_of_the_surroundings_is_an_input(tmp_path):
    """Another place, folder, hash seed, user, locale, time zone, optimisation: the same keys."""
    place = tmp_path / "a path with spaces" / "fusekit"
    shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__"))
    # Specs are data beside the package or inside it, depending on how it is installed.
    if (PACKAGE.parent / "kernel_specs").is_dir():
        shutil.copytree(PACKAGE.parent / "kernel_specs", place.parent / "kernel_specs")
    here = keys_in(tmp_path, PACKAGE, PYTHONHASHSEED="0")
    there = keys_in(
        place.parent,
        place,
        PYTHONHASHSEED="4242",
        USER="somebody",
        LOGNAME="somebody",
        HOME="/nonexistent",
        LC_ALL="C",
        LANG="tr_TR.UTF-8",
        TZ="Asia/Kathmandu",
        PYTHONOPTIMIZE="1",
        CUTE_DSL_ARCH="sm_100a",
        FUSEKIT_STORE="/somewhere",
    )
    assert here == there
    assert len(set(here.values())) > 1


def test_the_order_of_a_dict_is_no_input():
    fields = Identity().key_fields(SPEC)
    assert key_of(dict(reversed(fields.items()))) == key_of(fields)
    spec = SPEC.device_spec()
    toolchain, sources = {"x": "1", "y": "2"}, {"a": "0" * 64, "b": "1" * 64}

    def fields(turn):
        return keys.key_fields(
            device_spec=turn(spec), arch="a", options="o", toolchain=turn(toolchain), sources=turn(sources)
        )

    assert fields(dict) == fields(lambda mapping: dict(reversed(mapping.items())))


def test_explain_names_every_field_that_differs():
    """The fields of a key are what `explain` compares: a change of one input is seen as that input's, and no other."""
    before = Identity().key_fields(SPEC)
    for name in ("dtype", "alpha", "row_scale"):
        after = Identity().key_fields(dataclasses.replace(SPEC, **{name: INPUT[name]}))
        changed = {label for label in before | after if before.get(label) != after.get(label)}
        own = {f"source.plan/operands/{name}.py", f"source.kernels/gemm/operands/{name}.py"}
        assert changed == {f"spec.{name}"} | (own if name in ("alpha", "row_scale") else set())
