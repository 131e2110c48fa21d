"""Keys are complete and stable: every input is changed in turn, and so is everything that must not count."""

import dataclasses
import json
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from fusekit.compiler import identity, toolchain
from fusekit.compiler.identity import Identity
from fusekit.errors import ToolchainError
from fusekit.plan.arch import ARCHITECTURES
from fusekit.plan.quant import Quant
from fusekit.spec import KernelSpec
from fusekit.store import entries, key_of, keys
from tests.compiler.keyed import PACKAGE, SPEC, key

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
    "activation": dataclasses.replace(SPEC.activation, kind="relu"),
    "glu_layout": "concat",
    "quant": Quant("fp8-row"),
    "tile": (64, 128),
    "cluster": (1, 1),
    "mainloop": "cooperative",
    "schedule": "dynamic" if SPEC.schedule == "static" else "static",
}


def other(value):
    """Another value of a type that this file does not know yet."""
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


def asking_otherwise(name):
    """SPEC with another value of an operand's key."""
    value = "scalar" if name == "alpha" else other(SPEC.operands[name])
    return dataclasses.replace(SPEC, operands={**SPEC.operands, name: value})


@pytest.mark.parametrize("name", SPEC.operands)
def test_every_operand(name):
    assert key(asking_otherwise(name)) != key()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KernelSpec) if field.name != "operands"])
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
    result = {distribution.name: distribution.version for distribution in metadata.distributions() if distribution.name}

    def distributions():
        return iter(Distribution(name, version) for name, version in result.items())

    monkeypatch.setattr(toolchain.metadata, "distributions", distributions)
    monkeypatch.setattr(toolchain, "_local", lambda *_: {})  # whose files are looked at in test_toolchain_files.py
    return result


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
    names = {f"nvidia-cutlass-dsl-libs-{item}" for item in ("cu12", "cu13")}
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
    monkeypatch.setattr(identity, "compile_options", lambda arch, **given: real(arch, **given) + " --opt-level=2")
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(entries, "SCHEMA", entries.SCHEMA + 1)
    assert key() == before
    monkeypatch.setattr(keys, "SCHEMA", keys.SCHEMA + 1)
    assert key() != before


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
    # Specs are data next to the package or inside it, depending on how it is installed.
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
        changed = asking_otherwise(name) if name in SPEC.operands else dataclasses.replace(SPEC, **{name: INPUT[name]})
        after = Identity().key_fields(changed)
        changed = {label for label in before | after if before.get(label) != after.get(label)}
        own = {f"source.plan/operands/{name}.py", f"source.kernels/gemm/operands/{name}.py"}
        assert changed == {f"spec.{name}"} | (own if name in ("alpha", "row_scale") else set())
