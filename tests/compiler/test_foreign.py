"""What a foreign kernel's key is made of: each change of it is a miss, or an error in words. A package is made here."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

import fusekit
from fusekit.compiler.build import BuildPlan, execute, plan_build
from fusekit.compiler.explain import explained
from fusekit.compiler.foreign import Foreign, describe, normal
from fusekit.compiler.identity import Identity, key_fields_for
from fusekit.compiler.options import compile_options, environment
from fusekit.compiler.pool import ForkServer
from fusekit.compiler.worker import Job
from fusekit.errors import BuildError
from fusekit.spec import parse_text
from fusekit.spec.catalog import find
from fusekit.store import Store
from fusekit.store.keys import with_spec


def spec_of(source, *distributions):
    (spec,) = parse_text(
        f"""schema = 1
        [[kernel]]
        name = "k"
        op = "extern"
        source = "{source}"
        arch = "sm_90a"
        distributions = {list(distributions)}""",
        "own",
    )
    return spec


class Package:
    """A distribution below `folder`, as an installer leaves it: a package of two modules, a data file, metadata."""

    def __init__(self, folder, name, requires=(), version="1.0"):
        self.folder, self.name = folder, name
        self.module = name.replace("-", "_")
        self.files = {f"{self.module}/__init__.py": "", f"{self.module}/kernels.py": "def make(): ...\n",
                      f"{self.module}/table.json": "{}"}  # fmt: skip
        self.write(version, requires)

    def write(self, version, requires=()):
        for old in self.folder.glob(f"{self.module}-*.dist-info/*"):
            old.unlink()
        for old in self.folder.glob(f"{self.module}-*.dist-info"):
            old.rmdir()
        info = f"{self.module}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {version}", "License-Expression: MIT"]
        metadata = "\n".join(lines + [f"Requires-Dist: {require}" for require in requires]) + "\n"
        files = {**self.files, f"{info}/METADATA": metadata, f"{info}/top_level.txt": f"{self.module}\n"}
        listed = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD", f"{self.module}/__pycache__/x.pyc"])
        for name, text in {**files, f"{info}/RECORD": listed}.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def differing(one, other):
    return sorted(label for label in {*one, *other} if one.get(label) != other.get(label))


def test_files_that_an_import_would_not_load_do_not_replace_those_that_it_would(folder, tmp_path_factory, monkeypatch):
    """A changed copy that comes first on the path, as a checkout or an editable installation does."""
    Package(folder, "elsewhere-kernels", requires=["nvidia-cutlass-dsl"])
    spec = spec_of("elsewhere_kernels.kernels:make")
    installed = Foreign().fields(spec)
    assert "foreign.files.elsewhere-kernels" in installed
    first = tmp_path_factory.mktemp("first")
    package = first / "elsewhere_kernels"
    package.mkdir()
    for name in ("__init__.py", "helper.py"):
        (package / name).write_text("")
    (package / "kernels.py").write_text("from elsewhere_kernels import helper\n")
    monkeypatch.syspath_prepend(str(first))
    fields = Foreign().fields(spec)
    assert fields != installed and "foreign.files.elsewhere-kernels" not in fields
    (package / "helper.py").write_text("FACTOR = 7\n")
    assert differing(fields, Foreign().fields(spec)) == ["foreign.module.elsewhere_kernels/helper.py"]


def test_every_file_of_a_distribution_counts(folder):
    Package(folder, "throw-away", ["needed>=2", "extra-only; extra == 'x'", "nvidia-cutlass-dsl>=4"])
    Package(folder, "needed", version="2.1")
    spec = spec_of("throw_away.kernels:make")
    before = Foreign().fields(spec)
    assert set(before) == {"foreign.files.throw-away", "foreign.version.throw-away", "foreign.version.needed"}
    assert (before["foreign.version.throw-away"], before["foreign.version.needed"]) == ("1.0", "2.1")
    assert describe(before) == {"throw-away": {"version": "1.0", "licence": "MIT"}}
    assert Foreign().fields(spec) == before

    (folder / "throw_away" / "__pycache__").mkdir()
    (folder / "throw_away" / "__pycache__" / "x.pyc").write_text("any")
    assert Foreign().fields(spec) == before
    (folder / "throw_away" / "table.json").write_text("[]")
    assert differing(before, Foreign().fields(spec)) == ["foreign.files.throw-away"]
    (folder / "throw_away" / "table.json").unlink()
    assert differing(before, Foreign().fields(spec)) == ["foreign.files.throw-away"]


def test_what_leads_to_the_dsl_counts_whole_however_many_levels_away(folder):
    """As a package of kernels that is reinstalled at the same version with other content."""
    first = Package(folder, "user", ["middle"])
    Package(folder, "middle", ["deep>=1", "plain"])
    deep = Package(folder, "deep", ["nvidia-cutlass-dsl"])
    Package(folder, "plain", ["plainer"])
    Package(folder, "plainer", version="3.0")
    Package(folder, "unrelated", ["nvidia-cutlass-dsl"])
    before = Foreign().fields(spec_of("user.kernels:make"))
    whole = {label.removeprefix("foreign.files.") for label in before if label.startswith("foreign.files.")}
    assert whole == {"user", "middle", "deep"}
    assert before["foreign.version.plainer"] == "3.0"
    assert not any("unrelated" in label for label in before)
    for package in (deep, first):
        package.files[f"{package.module}/kernels.py"] = "FACTOR = 3\n"
        package.write("1.0", ["nvidia-cutlass-dsl"] if package is deep else ["middle"])
        after = Foreign().fields(spec_of("user.kernels:make"))
        assert differing(before, after) == [f"foreign.files.{package.name}"]
        before = after


def test_a_file_that_imports_the_dsl_makes_its_distribution_count(folder):
    """No requirement has to state it: kernels that are vendored, or imported if they are there."""
    Package(folder, "vendor", ["frame"])
    Package(folder, "frame")
    (folder / "frame/kernels.py").write_text("def f():\n    import json, cutlass.cute as cute\n")
    before = Foreign().fields(spec_of("vendor.kernels:make"))
    assert "foreign.files.frame" in before
    (folder / "frame/kernels.py").write_text("def f():\n    import json\n")
    assert "foreign.files.frame" not in Foreign().fields(spec_of("vendor.kernels:make"))


@pytest.mark.parametrize(
    "line",
    [
        "import hidden",
        "import json, hidden.kernels as k",
        "if 1: from hidden import kernels",
        "x = import_module('hidden.kernels')",
    ],
)
def test_an_import_that_no_requirement_states_is_followed(folder, line):
    Package(folder, "user", ["nvidia-cutlass-dsl"])
    Package(folder, "hidden")
    (folder / "hidden/__init__.py").write_text("import cutlass\n")
    assert not any("hidden" in label for label in Foreign().fields(spec_of("user.kernels:make")))
    (folder / "user/table.json").write_text(line)
    assert not any("hidden" in label for label in Foreign().fields(spec_of("user.kernels:make")))
    (folder / "user/kernels.py").write_text(f"{line}\n")
    assert "foreign.files.hidden" in Foreign().fields(spec_of("user.kernels:make"))


def test_a_file_that_was_added_to_a_package_counts(folder):
    Package(folder, "user", ["nvidia-cutlass-dsl"])
    before = Foreign().fields(spec_of("user.kernels:make"))
    (folder / "user/kernels").mkdir()
    (folder / "user/kernels/__init__.py").write_text("")  # which an import takes before kernels.py
    assert differing(before, Foreign().fields(spec_of("user.kernels:make"))) == ["foreign.files.user"]


def test_the_sources_of_an_editable_installation_that_a_package_requires_count(folder, tmp_path_factory, monkeypatch):
    Package(folder, "user", ["edited"])
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "edited").mkdir()
    (checkout / "edited/kernels.py").write_text("import cutlass\n")
    monkeypatch.syspath_prepend(str(checkout))
    package = Package(folder, "edited", ["nvidia-cutlass-dsl"])
    for name in package.files:
        (folder / name).unlink()
    before = Foreign().fields(spec_of("user.kernels:make"))
    assert "foreign.module.edited/kernels.py" in before
    (checkout / "edited/kernels.py").write_text("import cutlass  # changed\n")
    assert differing(before, Foreign().fields(spec_of("user.kernels:make"))) == ["foreign.module.edited/kernels.py"]


def test_extension_modules_of_a_package_count(folder):
    (folder / "pack").mkdir()
    (folder / "pack/__init__.py").write_text("from pack import fast\n")
    (folder / "pack/fast.abi3.so").write_text("1")
    before = Foreign().fields(spec_of("pack:f"))
    (folder / "pack/fast.abi3.so").write_text("2")
    assert differing(before, Foreign().fields(spec_of("pack:f"))) == ["foreign.module.pack/fast.abi3.so"]


def test_another_version_is_a_miss(folder):
    package = Package(folder, "throw-away", ["needed"])
    needed = Package(folder, "needed", version="2.1")
    spec = spec_of("throw_away.kernels:make")
    before = Foreign().fields(spec)
    needed.write("2.2")
    assert differing(before, Foreign().fields(spec)) == ["foreign.version.needed"]
    package.write("1.1", ["needed"])
    assert "foreign.version.throw-away" in differing(before, Foreign().fields(spec))


def test_a_users_module_and_what_it_imports_next_to_it(folder):
    (folder / "mine.py").write_text("import helper\nfrom throw_away import kernels\nimport plain, json\ndef f(): ...\n")
    (folder / "helper.py").write_text("import deeper\n")
    (folder / "deeper.py").write_text("")
    (folder / "other.py").write_text("")
    Package(folder, "throw-away", ["nvidia-cutlass-dsl"])
    Package(folder, "plain")
    before = Foreign().fields(spec_of("mine:f"))
    # Whole where it builds on the DSL, else by version.
    assert set(before) == {
        "foreign.module.mine.py", "foreign.module.helper.py", "foreign.module.deeper.py", "foreign.files.throw-away",
        "foreign.version.throw-away", "foreign.version.plain",
    }  # fmt: skip
    for name in ("mine", "helper", "deeper", "other"):
        was = (folder / f"{name}.py").read_text()
        (folder / f"{name}.py").write_text(was + "# changed\n")
        changed = [] if name == "other" else [f"foreign.module.{name}.py"]
        assert differing(before, Foreign().fields(spec_of("mine:f"))) == changed
        (folder / f"{name}.py").write_text(was)


def test_modules_that_are_imported_by_name_count(folder):
    (folder / "mine.py").write_text("from importlib import import_module\ndef f(): return import_module('late')\n")
    (folder / "late.py").write_text("SIZE = 1\n")
    before = Foreign().fields(spec_of("mine:f"))
    (folder / "late.py").write_text("SIZE = 2\n")
    assert differing(before, Foreign().fields(spec_of("mine:f"))) == ["foreign.module.late.py"]


def test_modules_of_another_folder_on_the_path_count_too(folder, monkeypatch):
    other = folder / "elsewhere"
    (other / "shared").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(other))
    (folder / "mine.py").write_text("from shared import deep\ndef f(): ...\n")
    (other / "shared" / "__init__.py").write_text("")
    (other / "shared" / "deep.py").write_text("")
    before = Foreign().fields(spec_of("mine:f"))
    assert set(before) == {f"foreign.module.{name}" for name in ("mine.py", "shared/__init__.py", "shared/deep.py")}
    (other / "shared" / "deep.py").write_text("# changed\n")
    assert differing(before, Foreign().fields(spec_of("mine:f"))) == ["foreign.module.shared/deep.py"]
    assert Foreign().path_to("mine", "shared.deep") == []


def test_a_users_package_follows_relative_imports(folder):
    package = folder / "pack"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "", "inner/__init__.py": "", "inner/a.py": "from ..b import c\nfrom . import d\n", "b.py": "",
        "inner/d.py": "", "e.py": "",
    }.items():  # fmt: skip
        (package / name).write_text(text)
    fields = Foreign().fields(spec_of("pack.inner.a:f"))
    names = ["__init__.py", "b.py", "inner/__init__.py", "inner/a.py", "inner/d.py"]
    assert sorted(fields) == [f"foreign.module.pack/{name}" for name in names]
    digest = hashlib.sha256((package / "inner/a.py").read_bytes()).hexdigest()
    assert fields["foreign.module.pack/inner/a.py"] == digest


def test_what_is_named_and_not_installed(folder):
    (folder / "mine.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(BuildError, match="no-such-thing is not installed, whose kernels the spec names; pip install"):
        Foreign().fields(spec_of("mine:f", "no-such-thing"))
    assert Foreign().fields(spec_of("mine:f"))["foreign.version.not_installed_anywhere"] == "absent"
    with pytest.raises(BuildError, match="there is no module nowhere_to_be_found on Python's path"):
        Foreign().fields(spec_of("nowhere_to_be_found.x:f"))
    with pytest.raises(BuildError, match=r"mine.py: .*; fix it"):
        (folder / "mine.py").write_text("def f(:\n")
        Foreign().fields(spec_of("mine:f"))


def test_a_missing_extra_is_named(folder, monkeypatch):
    def gone(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", gone)
    for name, extra in (("quack-kernels", "quack"), ("nvidia-cudnn-frontend", "cudnn")):
        with pytest.raises(BuildError, match=rf"pip install '\.\[{extra}\]'"):
            Foreign().fields(spec_of("fusekit.providers.quack:rmsnorm", name))


def test_nothing_foreign_is_run(folder):
    (folder / "loud.py").write_text("raise SystemExit('ran')\n")
    Foreign().fields(spec_of("loud:f"))
    assert "loud" not in sys.modules


LOADED = """
import json, sys
before = set(sys.modules)
from fusekit.compiler.extern import plan
from fusekit.spec.catalog import find
(spec,) = (spec for spec in find([sys.argv[1]]) if spec.arch == sys.argv[2])
plan(spec)
print(json.dumps({name: sys.modules[name].__file__ for name in {*sys.modules} - before
                  if getattr(sys.modules[name], "__file__", None)}))
"""


@pytest.mark.parametrize(
    ("name", "arch"),
    [("quack/gemm-gated@tile128x192-activation-swiglu", "sm_90a"), ("cudnn/quant-nvfp4@schedule-static", "sm_100a")],
)
def test_every_module_that_is_loaded_is_in_the_key(tmp_path, name, arch):
    """Whole files of the package that is called, versions of what that requires, the providers' own modules."""
    package = name.partition("/")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install '.[{package}]'")
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, name, arch], env=environment(tmp_path, arch), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    (spec,) = (spec for spec in find([name]) if spec.arch == arch)
    fields = key_fields_for(spec)
    owners = metadata.packages_distributions()
    whole = {label.removeprefix("foreign.files.") for label in fields if label.startswith("foreign.files.")}
    seen = set()
    for module, file in json.loads(ran.stdout.splitlines()[-1]).items():
        top = module.partition(".")[0]
        path = Path(file)
        if top == "fusekit" and module.startswith("fusekit.providers"):
            seen.add(fields[f"foreign.module.fusekit/{path.relative_to(Path(fusekit.__file__).parent).as_posix()}"])
        for owner in {normal(item) for item in owners.get(top, ())} & whole:
            listed = {Path(str(file.locate())).resolve() for file in metadata.distribution(owner).files}
            assert path.resolve() in listed, f"{module} is no file of {owner}, whose files are in the key"
            seen.add(owner)
    assert whole
    assert whole <= seen
    assert len(seen) > len(whole)
    for label in ("compiler/intercept.py", "compiler/extern.py", "compiler/leaves.py", "compiler/trace.py"):
        assert f"source.{label}" in fields


def test_a_missing_package_fails_its_own_kernel_alone(folder):
    (folder / "mine.py").write_text("def f(): ...\n")
    lost = [spec_of("mine:f", "no-such-thing"), spec_of("nowhere_to_be_found.x:f")]
    store = Store(folder / "store")
    wanted = plan_build([*lost, spec_of("mine:f")], store)
    assert [item.error for item in wanted.failed] == [
        "no-such-thing is not installed, whose kernels the spec names; pip install 'no-such-thing'",
        "source nowhere_to_be_found.x: there is no module nowhere_to_be_found on Python's path or in the current"
        " folder; install it, or build from the folder that it is in",
    ]
    assert len(wanted.misses) == 1
    report = execute(BuildPlan(failed=wanted.failed), store)
    assert report.failed == list(wanted.failed)
    assert not report.ok
    assert explained(store, lost[0], Identity()).status == "unknown"


STATEFUL = """
import os
from pathlib import Path
{at_import}
with Path(__file__).with_suffix(".log").open("a") as log:
    log.write("imported\\n")
CALLS = []


def f():
    CALLS.append(1)
    raise ValueError(f"call {{len(CALLS)}}")
"""


def compiled_by(worker, fields):
    spec = spec_of("mine:f")
    fields = fields | with_spec({"options": compile_options("sm_90a")}, spec.device_spec())
    with pytest.raises(BuildError) as caught:
        worker.compile(Job("mine/f", None, spec, fields, ("mine", "sm_90a")))
    return str(caught.value)


def test_what_a_source_leaves_in_a_module_reaches_no_other_kernel(folder):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    (folder / "mine.py").write_text(STATEFUL.format(at_import=""))
    (folder / "made").mkdir()
    with closing(ForkServer(folder / "made")) as server:
        first, second = server.worker(), server.worker()
        words = [compiled_by(worker, {"foreign.module.mine.py": "1"}) for worker in (first, first, second)]
        assert words == [f"source mine:f raised ValueError: call 1 ({folder}/mine.py, line 12)"] * 3
        imported = folder / "mine.log"
        assert imported.read_text() == "imported\n"  # once for all of them
        (folder / "mine.py").write_text(STATEFUL.format(at_import="CALLS = 'edited'").replace("call {", "edited {"))
        message = compiled_by(first, {"foreign.module.mine.py": "2"})
        assert message == f"source mine:f raised ValueError: edited 1 ({folder}/mine.py, line 12)"
        (folder / "mine.py").write_text(STATEFUL.format(at_import="print('bye', flush=True); os._exit(7)"))
        message = compiled_by(first, {"foreign.module.mine.py": "3"})
        assert message == "importing mine ends the process (exit code 7); its last words: bye"
