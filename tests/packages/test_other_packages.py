"""An operation, an activation and an operand of other packages, from a spec file to a launch: nothing of fusekit's is
changed for them.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.store import Store
from tests.packages import stories

ROOT = Path(__file__).parents[2]


class Machine:
    """A folder for packages, spec files and a store; commands run in processes of their own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "packages").mkdir()

    def install(self, package, group, point, files):
        return stories.install(self.folder / "packages", package, group, point, files)

    def spec(self, name, text):
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return str(path)

    def __call__(self, *arguments, code=0, packages=True, script=("-m", "fusekit")):
        path = [str(ROOT), *([str(self.folder / "packages")] if packages else [])]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FUSEKIT_")}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "FUSEKIT_STORE": str(self.folder / "store")}
        run = subprocess.run(
            [sys.executable, *script, *arguments], env=environment, cwd=self.folder, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout + run.stderr

    def launch(self, *arguments, name, code=0, packages=True):
        """Over a stand-in for the driver, whose only kernel is `name`."""
        store = Store(self.folder / "store")
        (found,) = store.names(name)
        entry = self.folder / "entry.json"
        entry.write_text(json.dumps(store.find_entry(found.record.key).launch))
        script = (str(ROOT / "tests" / "packages" / "standin.py"), str(entry))
        return self(*arguments, code=code, packages=packages, script=script)

    def python(self, text, packages=True):
        return self(text, packages=packages, script=("-c",))


@contextlib.contextmanager
def edited(machine, name, text):
    """The file `name` of the packages has `text` meanwhile."""
    file = machine.folder / "packages" / name
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


@pytest.fixture(scope="module")
def built():
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")


def machine_with(tmp_path_factory, *story, name, spec):
    machine = Machine(tmp_path_factory.mktemp(name))
    machine.install(*story)
    machine("build", machine.spec("s", spec))
    return machine


@pytest.fixture(scope="module")
def double(tmp_path_factory, built):
    point = "fusekit.operations", "double-it = doubling.operation:DOUBLE"
    return machine_with(
        tmp_path_factory, "doubling", *point, stories.OPERATION, name="double", spec=stories.DOUBLE_SPEC
    )


@pytest.fixture(scope="module")
def hard(tmp_path_factory, built):
    point = "fusekit.activations", "hardswish = swishing.activation"
    return machine_with(
        tmp_path_factory, "swishing", *point, stories.ACTIVATION, name="hard", spec=stories.ACTIVATION_SPEC
    )


@pytest.fixture(scope="module")
def shifted(tmp_path_factory, built):
    point = "fusekit.operands", "row_shift = shifting.plan:ROW_SHIFT"
    return machine_with(
        tmp_path_factory, "shifting", *point, stories.OPERAND, name="shifted", spec=stories.OPERAND_SPEC
    )


LOADED = "import sys; from fusekit_cli.main import main; main(['ls']); print(sorted(sys.modules))"


def test_an_operation_is_listed_without_its_package(double):
    listed = double.python(LOADED)
    assert "s/k@w2" in listed and "s/k@w4" in listed
    assert not any(f"'{module}'" in listed for module in ("doubling", "cutlass", "numpy", "cuda"))


def test_a_key_holds_the_whole_package(double):
    fields = json.loads(double("show", "s/k", "--json"))["fields"]
    assert {"source.doubling/kernels.py", "source.doubling/words.py", "source.abi/arguments.py"} <= fields.keys()
    assert not any(label.startswith("source.kernels/") for label in fields)
    text = stories.OPERATION["kernels.py"]
    with edited(double, "doubling/kernels.py", text.replace("2.0", "3.0")):
        assert "2 to build" in double("build", "s.toml", "--dry-run")
    assert "0 to build" in double("build", "s.toml", "--dry-run")


@pytest.mark.parametrize(
    ("change", "why"),
    [(("[2, 4]", "16"), "warps = 16: must be 8 at most"), (("warps", "warp"), 'did you mean "warps"')],
)
def test_the_schema_of_an_operation_is_its_package_s(double, change, why):
    assert why in double("build", double.spec("t", stories.DOUBLE_SPEC.replace(*change)), code=2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_of_this_name", "the package doubling cannot be imported: ModuleNotFoundError"),
        ("DOUBLE = 1", "its entry point gives 1; it must give a fusekit.plan.operations.Operation"),
    ],
)
def test_an_operation_that_cannot_be_used_is_named(double, text, why):
    with edited(double, "doubling/operation.py", text):
        assert why in double("build", "s.toml", code=2)


def test_an_operation_is_shown_with_its_words(double):
    shown = json.loads(double("show", "s/k", "--json"))
    assert shown["name"] == "s/k@w4"  # the one that the package's `variants` puts first
    assert {each["name"]: each["what"] for each in shown["arguments"]} == {"x": "What is doubled.", "y": "Twice x."}


def test_an_operation_runs_and_is_compared_with_its_reference(double):
    document = json.loads(double.launch("run", "s/k", "--check", "--json", name="s/k@w4"))
    assert document["name"] == "s/k@w4" and document["ok"] and document["error"]["max_scaled"] < 1
    assert document["notes"] == []


def test_a_reference_that_differs_is_seen(double):
    with edited(double, "doubling/reference.py", stories.OPERATION["reference.py"].replace("2.0", "2.001")):
        document = json.loads(double.launch("run", "s/k", "--check", "--json", name="s/k@w4", code=1))
    assert "y: WRONG" in document["problems"][0]


def test_what_an_operation_leaves_out_is_said(double):
    left_out = "variants=", "reference=", "words="
    lines = stories.OPERATION["operation.py"].splitlines(keepends=True)
    text = "".join(line for line in lines if not line.strip().startswith(left_out))
    with edited(double, "doubling/operation.py", text):
        why = "the package doubling gives no `variants`, which says which of several variants is loaded"
        assert why in double("show", "s/k", code=2)
        assert why in double.launch("run", "s/k", name="s/k@w4", code=2)
        shown = json.loads(double("show", "s/k@w2", "--json"))
        assert {each["what"] for each in shown["arguments"]} == {""}
        document = json.loads(double.launch("run", "s/k@w4", "--check", "--json", name="s/k@w4"))
        assert "the package doubling gives no `reference`" in document["notes"][0] and document["error"] is None


def test_bench_says_what_it_times(double):
    assert "s/k has no benchmark" in double.launch("bench", "s/k", name="s/k@w4", code=2)


def test_an_operation_whose_package_is_gone_can_still_be_launched(double):
    document = json.loads(double.launch("run", "s/k@w4", "--json", name="s/k@w4", packages=False))
    assert "op double-it is of a package that is not installed here" in document["notes"][0]
    refused = double.launch("run", "s/k", name="s/k@w4", code=2, packages=False)
    assert "give the full name, such as s/k@w2, or install the package of double-it" in refused
    assert 'op = "double-it": must be' in double("build", str(double.folder / "s.toml"), code=2, packages=False)


def test_an_activation_is_built_shown_and_run(hard):
    name = "s/hard@64x64-c1x1-dynamic"
    shown = json.loads(hard("show", "s/hard", "--json"))
    assert shown["name"] == name and "source.swishing/activation.py" in shown["fields"]
    assert not any(label.startswith("source.plan/activations/s") for label in shown["fields"])
    hard.launch("run", "s/hard", name=name)
    wrong = hard.launch("run", "s/hard", "--check", name=name, code=1)  # the stand-in computes nothing
    assert "elements were not written" in wrong


VALUES = """
import numpy as np
from fusekit.reference import gemm, make_inputs
from fusekit.spec import parse_file
(spec,) = parse_file("s.toml")
inputs = make_inputs(spec.canonical(), E=1, M=100, N=64, K=64, seed=0)
print(np.abs(gemm(spec, inputs)["y"] - expected(gemm(plain(spec), inputs)["y"], inputs)).max() < 1e-12)
"""
PLAIN = """
import json
def plain(spec):
    keys = {key: value for key, value in spec.canonical().items() if key != "row_shift"}
    return {**keys, "activation": {**keys["activation"], "kind": "identity"}}
"""


def test_the_reference_of_an_activation_is_its_package_s(hard):
    expected = "def expected(z, inputs):\n    return z * np.clip(z + 3, 0, 6) / 6\n"
    assert "True" in hard.python(PLAIN + "import numpy as np\n" + expected + VALUES)


def test_an_activation_has_no_derivative_unless_it_says_so(hard):
    text = stories.ACTIVATION_SPEC.replace("hardswish", "dhardswish")
    assert 'activation.kind = "dhardswish": must be' in hard("build", hard.spec("d", text), code=2)


def test_an_activation_without_a_reference_is_not_compared(hard):
    text = stories.ACTIVATION["activation.py"].replace('REFERENCE = "swishing.reference"', "")
    with edited(hard, "swishing/activation.py", text):
        said = hard.launch("run", "s/hard", "--check", name="s/hard@64x64-c1x1-dynamic", code=2)
    assert "the package swishing gives no REFERENCE in swishing.activation" in said


def test_an_activation_whose_package_is_gone_is_named(hard):
    said = hard.launch("run", "s/hard", name="s/hard@64x64-c1x1-dynamic", code=2, packages=False)
    assert "activation 'hardswish' is of no package that is installed here" in said
    assert "s/hard" in hard("ls", packages=False)
    assert json.loads(hard("show", "s/hard", "--json", packages=False))["name"].startswith("s/hard@")


def test_an_operand_is_built_shown_and_run(shifted):
    name = "s/shifted@64x64-c1x1-dynamic"
    shown = json.loads(shifted("show", "s/shifted", "--json"))
    words = {each["name"]: each["what"] for each in shown["arguments"]}
    assert words["row_shift"] == "Added to every output of a row."
    assert {"source.shifting/plan.py", "source.shifting/device.py"} <= shown["fields"].keys()
    assert shown["spec"]["row_shift"] is True
    shifted.launch("run", "s/shifted", name=name)
    assert "elements were not written" in shifted.launch("run", "s/shifted", "--check", name=name, code=1)
    refused = shifted.launch("run", "s/shifted", name=name, code=2, packages=False)
    assert "takes row_shift, which no operand has that is installed here" in refused


def test_the_reference_of_an_operand_is_its_package_s(shifted):
    expected = 'def expected(z, inputs):\n    return z + inputs["row_shift"][:, None].astype(float)\n'
    assert "True" in shifted.python(PLAIN + "import numpy as np\n" + expected + VALUES)


CANONICAL = """
import json
from fusekit.spec import parse_file, packaged_files
for path in packaged_files():
    if path.stem in ("quickstart", "mixtral-8x7b"):
        print(json.dumps([[spec.canonical(), spec.device_spec()] for spec in parse_file(path)]))
"""


def test_other_kernels_do_not_notice_an_operand(shifted):
    assert shifted.python(CANONICAL) == shifted.python(CANONICAL, packages=False)


@pytest.mark.parametrize(
    ("group", "point", "files", "why"),
    [
        ("operands", "clip = broken.plan:CLIP", {"plan.py": "import nothing_of_this_name"}, "cannot be imported"),
        ("operands", "clip = broken.plan:CLIP", {"plan.py": "CLIP = 1"}, "its entry point gives 1; it must give"),
        ("activations", "mish = broken.plan", {"plan.py": "import nothing_of_this_name"}, "cannot be imported"),
        ("activations", "mish = broken.plan", {"plan.py": ""}, "it must give a module with value(m, z)"),
        ("activations", "dmish = broken.plan", {"plan.py": "def value(m, z): ..."}, "is that of a derivative"),
    ],
)
def test_a_package_that_cannot_be_used_takes_nothing_else_with_it(tmp_path, group, point, files, why):
    machine = Machine(tmp_path)
    machine.install("broken", f"fusekit.{group}", point, files)
    text = stories.OPERAND_SPEC.replace("row_shift = true", "")
    said = machine("build", machine.spec("s", text), "--dry-run")
    assert "1 to build" in said
    assert f"left out: the {group.removesuffix('s')} {point.partition(' ')[0]} of the package broken" in said
    assert why in said
