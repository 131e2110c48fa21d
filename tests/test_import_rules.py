"""Who may import whom, checked from the source and in fresh processes.

| package | may import, beside the standard library |
|---|---|
| errors, dtypes | nothing; dtypes is for everybody |
| config | errors, platformdirs; project for its types |
| project | errors |
| abi | errors |
| plan | errors, abi |
| choice | errors, plan; store, to read a tuning table |
| spec | errors, plan, choice |
| store | errors, config, filelock, for signatures cryptography |
| share | errors, config, abi, store, cabi, filelock; for remotes fsspec, aiohttp, tenacity |
| kernels | cutlass, plan, and the stream type of cuda.bindings.driver |
| compiler | errors, config, project, plan, spec, abi, store, share, kernels, choice; cutlass, llvmlite, distributed |
| runtime | errors, config, abi, store, choice, cuda.bindings |
| layers | errors, abi, store, runtime, exchange |
| exchange | errors, plan, runtime |
| cpu | errors, plan, runtime, layers, reference, spec, numpy |
| library | errors, config, project, abi, store, choice, runtime, layers, exchange, cpu |
| interop | errors, abi, library, runtime, layers, exchange, plan, spec, cpu; a framework in the module of its name |
| cabi | errors, abi |
| reference | numpy, spec, plan, errors |
| providers | compiler, the foreign package that a module is named after, the DSL |
| cute | errors, config, plan, spec, store, share, compiler; the DSL; the packages of its plans |
| bench | library, runtime, layers, reference, interop, what these may import; PyTorch |
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fusekit"
CLI = ROOT / "cli"

# Everything a room may import beside the standard library and itself.
MAY = {
    "errors": set(),
    "dtypes": set(),
    "config": {"fusekit.errors", "fusekit.project", "platformdirs"},
    "project": {"fusekit.errors", "fusekit"},
    "abi": {"fusekit.errors"},
    "plan": {"fusekit.errors", "fusekit.abi"},
    "choice": {"fusekit.errors", "fusekit.plan", "fusekit.store"},
    "spec": {"fusekit.errors", "fusekit.plan", "fusekit.choice"},
    "store": {"fusekit.errors", "fusekit.config", "filelock", "cryptography"},
    "share": {
        "fusekit.errors", "fusekit.config", "fusekit.abi", "fusekit.store", "fusekit.cabi", "filelock", "fsspec",
        "aiohttp", "tenacity",
    },
    # CUstream is the type by which the DSL knows a stream.
    "kernels": {"cutlass", "fusekit.plan", "cuda.bindings.driver"},
    "compiler": {
        "fusekit.errors", "fusekit.config", "fusekit.project", "fusekit.plan", "fusekit.spec", "fusekit.abi",
        "fusekit.store", "fusekit.share", "fusekit.kernels", "fusekit.choice", "cutlass", "cuda.bindings", "llvmlite",
        "distributed",
    },
    "providers": {"fusekit.compiler", "cutlass", "cuda.bindings", "quack", "cudnn"},
    "runtime": {
        "fusekit.errors", "fusekit.config", "fusekit.abi", "fusekit.store", "fusekit.choice", "cuda.bindings",
    },
    "layers": {"fusekit.errors", "fusekit.abi", "fusekit.runtime", "fusekit.exchange", "fusekit.store"},
    "exchange": {"fusekit.errors", "fusekit.plan", "fusekit.runtime"},
    "cpu": {
        "fusekit.errors", "fusekit.plan", "fusekit.runtime", "fusekit.layers", "fusekit.reference", "fusekit.spec",
        "numpy",
    },
    "library": {
        "fusekit.errors", "fusekit.config", "fusekit.project", "fusekit.abi", "fusekit.store", "fusekit.choice",
        "fusekit.runtime", "fusekit.layers", "fusekit.exchange", "fusekit.cpu",
    },
    "interop": {
        "fusekit.errors", "fusekit.abi", "fusekit.library", "fusekit.runtime", "fusekit.layers", "fusekit.exchange",
        "fusekit.plan", "fusekit.spec", "fusekit.cpu",
    },
    "cabi": {"fusekit.errors", "fusekit.abi"},
    "reference": {"fusekit.errors", "fusekit.spec", "fusekit.plan", "numpy"},
    "bench": {
        "fusekit.errors", "fusekit.abi", "fusekit.store", "fusekit.spec", "fusekit.library", "fusekit.runtime",
        "fusekit.reference", "fusekit.interop", "fusekit.choice", "fusekit.plan", "fusekit.layers", "numpy",
        "cuda.bindings", "transformer_engine",
    },
    "cute": {
        "fusekit.errors", "fusekit.config", "fusekit.plan", "fusekit.spec", "fusekit.store", "fusekit.share",
        "fusekit.compiler", "cutlass", "tvm_ffi", "quack", "flash_attn", "flashinfer",
    },
    "__init__": {
        "fusekit.errors", "fusekit.config", "fusekit.library", "fusekit.compiler", "fusekit.cute",
    },
}  # fmt: skip

# A framework is imported by one module, which a program imports that uses it; the benchmarks run PyTorch beside.
FRAMEWORKS = {
    "torch": {
        "fusekit/cute/plans.py",
        "fusekit/interop/sglang.py",
        "fusekit/interop/torch.py",
        "fusekit/interop/torch_define.py",
        "fusekit/interop/torch_fp8.py",
        "fusekit/interop/torch_layer.py",
        "fusekit/interop/torch_moe.py",
        "fusekit/interop/torch_norm.py",
        "fusekit/interop/torch_ranks.py",
        "fusekit/interop/transformer_engine.py",
        "fusekit/interop/transformers.py",
        "fusekit/interop/transformers_blocks.py",
        "fusekit/interop/transformers_decoders.py",
        "fusekit/interop/transformers_modules.py",
        "fusekit/interop/transformers_mxfp4.py",
        "fusekit/interop/megatron.py",
        "fusekit/interop/torchtitan.py",
        "fusekit/providers/quack.py",
        "fusekit/bench/torch_gemm.py",
        "fusekit/bench/torch_router.py",
    },
    "transformers": {
        "fusekit/interop/transformers.py",
        "fusekit/interop/transformers_blocks.py",
        "fusekit/interop/transformers_mxfp4.py",
    },
    "transformer_engine": {"fusekit/bench/torch_router.py", "fusekit/interop/transformer_engine.py"},
    "vllm": {"fusekit/interop/vllm.py"},
    "sglang": {"fusekit/interop/sglang.py"},
    "megatron": {"fusekit/interop/megatron.py"},
    "torchtitan": {"fusekit/interop/torchtitan.py"},
    "jax": {f"fusekit/interop/{name}.py" for name in ("jax", "jax_calls", "jax_ragged", "jax_ranks")},
}

# Imported inside functions only: loading them costs more than all the rest, or they may be absent.
LAZY = {
    "cutlass", "llvmlite", "numpy", "cuda", "rich", "torch", "hypothesis", "fsspec", "aiohttp", "tenacity",
    "cryptography", "distributed", "filelock", "platformdirs", "transformer_engine",
}  # fmt: skip
LAZY_ROOMS = {"cutlass": {"kernels"}, "numpy": {"reference", "bench", "cpu"}, "cuda": {"kernels", "runtime", "bench"}}
CLI_LAZY = LAZY | {
    "fusekit.compiler",
    "fusekit.library",
    "fusekit.runtime",
    "fusekit.reference",
    "fusekit.bench",
    "fusekit.kernels",
}

# Device code is a pure function of its arguments: nothing here reaches files, processes or the environment.
KERNEL_STDLIB = {
    "__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "types", "typing",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    top: bool  # runs when the module is imported


def imports_of(path: Path) -> list[Import]:
    """Every import of a file by its absolute name; imports for type checkers alone are left out."""
    package = path.parent.relative_to(ROOT).parts

    def walk(nodes: list[ast.stmt] | Iterator[ast.AST], top: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, top) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join([*base, *([node.module] if node.module else [])])
                if module in ("fusekit", "cuda", "cli"):  # `from fusekit import store` imports a room
                    yield from (Import(f"{module}.{alias.name}", node.lineno, top) for alias in node.names)
                else:
                    yield Import(module, node.lineno, top)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse, top)
            else:
                inner = top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(ast.iter_child_nodes(node), inner)

    return list(walk(tree_of(path).body, True))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


LIBRARY_FILES = sorted({*PACKAGE.glob("**/*.py")} - {PACKAGE / "__main__.py"})  # that is the command line
CLI_FILES = sorted(CLI.glob("*.py"))


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in LIBRARY_FILES} <= set(MAY)


def test_library_imports():
    wrong = [f"{name_of(path)}, line {line}: {why}" for path in LIBRARY_FILES for line, why in forbidden_imports(path)]
    assert not wrong, "\n".join(wrong)


def forbidden_imports(path: Path) -> Iterator[tuple[int, str]]:
    room = room_of(path)
    allowed = MAY[room] | {f"fusekit.{room}", "fusekit.dtypes"}
    for got in imports_of(path):
        root = got.module.partition(".")[0]
        stdlib = root in sys.stdlib_module_names
        if root in FRAMEWORKS:
            if name_of(path) not in FRAMEWORKS[root]:
                yield got.line, f"may not import {got.module}"
            continue
        is_version = got.module == "fusekit"  # for its version
        if not (is_version or stdlib or within(got.module, allowed)):
            yield got.line, f"{room} may not import {got.module}"
        if got.top and root in LAZY and room not in LAZY_ROOMS.get(root, set()):
            yield got.line, f"{got.module} is imported at the top; import it where it is used"
        if room == "kernels" and stdlib and root not in KERNEL_STDLIB:
            yield got.line, f"device code may not import {got.module}"


def test_cli_imports_lazily():
    early = [
        f"{name_of(path)}, line {got.line}: {got.module} belongs inside the command"
        for path in CLI_FILES
        for got in imports_of(path)
        if got.top and within(got.module, CLI_LAZY)
    ]
    assert not early, "\n".join(early)


MAY_READ_THE_ENVIRONMENT = {
    PACKAGE / "config.py",
    PACKAGE / "compiler" / "options.py",
    PACKAGE / "compiler" / "reads.py",  # these listen to what others read, and compare it
    PACKAGE / "cute" / "files.py",
    PACKAGE / "cute" / "recorder.py",
    PACKAGE / "cute" / "startup" / "sitecustomize.py",  # it may run where fusekit is not installed
}


def test_the_environment_is_read_in_one_place():
    # A compile process gets an environment of its own, so that nothing in the user's can change what is compiled.
    reads = [
        f"{name_of(path)}, line {line} reads the environment; fusekit/config.py does that"
        for path in (*LIBRARY_FILES, *CLI_FILES)
        if path not in MAY_READ_THE_ENVIRONMENT
        for line in environment_reads(tree_of(path))
    ]
    assert not reads, "\n".join(reads)


def environment_reads(tree: ast.AST) -> Iterator[int]:
    # Writing is another matter: an assignment or a deletion.
    writes = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            if id(node) not in writes:
                yield node.lineno
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & {"environ", "getenv"}
        ):
            yield node.lineno


def test_no_module_level_mutable_state():
    state = [
        f"{name_of(path)}, line {line}: {why}"
        for path in (*LIBRARY_FILES, *CLI_FILES)
        for line, why in mutable_state(tree_of(path))
    ]
    assert not state, "\n".join(state)


def mutable_state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield from ((node.lineno, "global state") for node in ast.walk(tree) if isinstance(node, ast.Global))
    for node in tree.body:
        value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        empty = isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value).strip("[]{}")
        is_constructor = isinstance(value, ast.Call) and ast.unparse(value.func) in (
            "dict",
            "list",
            "set",
            "defaultdict",
            "deque",
        )
        if empty or (is_constructor and not value.args):
            yield node.lineno, "filled later, so it is state"


PRIVATE_DSL = {
    PACKAGE / "compiler" / "dsl.py", PACKAGE / "kernels" / "dsl.py",
    *(PACKAGE / "cute" / name for name in ("dsl.py", "images.py", "replaced.py", "tracing.py", "values.py")),
}  # fmt: skip
DSL_FILES = [path for path in LIBRARY_FILES if room_of(path) in ("compiler", "cute", "kernels", "plan", "providers")]
PRIVATE_PYTHON = {"_getframe", "_exit", "_asdict", "_write_atomic", "_get_dump"}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Attributes with an underscore that code reads, also by name, and words by which the DSL calls its parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            names = []
        yield from (name for name in names if re.fullmatch(r"_[a-z]\w*|__\w*(mlir|c_pointers)\w*", str(name)))
        if isinstance(node, ast.Constant) and re.match(r"_mlir_|cutlass\.(_|base_dsl|cutlass_dsl)", str(node.value)):
            yield node.value


def test_few_modules_hold_the_private_parts_of_the_dsl():
    trees = {path: tree_of(path) for path in DSL_FILES}
    defined = {*PRIVATE_PYTHON}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.id if isinstance(node, ast.Name) else node.attr)
    found = {path: set[str]() for path in DSL_FILES}
    for path in DSL_FILES:
        found[path] |= {got.module for got in imports_of(path)
                        if re.match(r"cutlass\.(_|base_dsl|cutlass_dsl)", got.module)}  # fmt: skip
        found[path] |= {name for name in private_names(trees[path]) if name not in defined}
    assert {path for path, names in found.items() if names} == PRIVATE_DSL, found


def loaded(statement: str, folder: Path, *, tolerate_exit: bool = False) -> set[str]:
    """Top-level names of the modules in a fresh process after `statement`."""
    if tolerate_exit:
        statement = f"try:\n    {statement}\nexcept SystemExit:\n    pass"
    code = f"import sys, json\n{statement}\nsys.stdout.write('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.rpartition("\n")[2]))


@pytest.mark.parametrize("room", sorted(set(MAY) - {"__init__", "kernels", "reference", "bench", "cpu"}))
def test_a_fresh_process_loads_nothing_heavy(room, tmp_path):
    modules = loaded(f"import fusekit.{room}", tmp_path)
    heavy = {"cutlass", "torch", "numpy", "llvmlite", "rich", "click", "hypothesis"}
    assert not modules & heavy
    if room not in ("runtime", "library"):
        assert "cuda" not in modules


def test_import_fusekit_is_light(tmp_path):
    modules = loaded("import fusekit", tmp_path)
    assert not {name for name in modules if name.startswith("fusekit.")} - {"fusekit.errors"}
    assert not modules & {"platformdirs", "tomllib", "json.tool", "ctypes", "asyncio", "inspect", "dataclasses"}


def test_help_loads_nothing_heavy(tmp_path):
    statement = "from fusekit_cli.main import main; sys.argv = ['fusekit', '--help']; main()"
    modules = loaded(statement, tmp_path, tolerate_exit=True)
    assert "click" in modules
    assert not modules & {"cutlass", "torch", "numpy", "llvmlite", "rich", "cuda", "hypothesis"}


def test_launching_needs_neither_the_lock_nor_the_tables(tmp_path):
    """A machine that only launches may have no more than click, platformdirs and cuda-bindings."""
    absent = "filelock", "rich", "numpy", "cutlass", "llvmlite", "torch", "fsspec", "tenacity", "cryptography"
    statement = "".join(f"sys.modules['{name}'] = None; " for name in absent)
    assert "fusekit.library" in loaded(f"{statement}import fusekit.library, fusekit.store, fusekit_cli.main", tmp_path)


def test_a_cold_start_reads_no_specs(tmp_path):
    """`fusekit run` counts its milliseconds: what only a build needs is not loaded."""
    modules = loaded("import fusekit.library, fusekit.bench.trial", tmp_path)
    assert not modules & {"tomllib", "statistics", "fusekit.spec.parse", "fusekit.spec.catalog", "fusekit.spec.fields"}


def test_benchmarks_need_no_framework(tmp_path):
    modules = loaded("import fusekit.bench.gemms, fusekit.bench.tokens, fusekit_cli.bench", tmp_path)
    assert not modules & {"torch", "jax", "transformer_engine", "rich"}


def test_no_import_makes_a_file(tmp_path):
    rooms = [room for room in MAY if room not in ("__init__", "kernels", "bench")]
    loaded("import " + ", ".join(f"fusekit.{room}" for room in rooms), tmp_path)
    assert list(tmp_path.iterdir()) == []
