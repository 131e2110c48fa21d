"""The installed compiler in a key: its version where its files are those of the wheel, else what differs."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import platformdirs
import pytest

from fusekit.compiler import digests, toolchain
from fusekit.compiler.options import compile_options
from fusekit.store.entries import toolchain_label

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
COMPILER = "nvidia_cutlass_dsl/dsl_packages/cutlass/compiler.py"


def install(site, tag="cp311"):
    """A CuTe DSL in the folder `site`, as pip leaves the wheels for one Python: those differ in the libraries alone."""
    package = "nvidia_cutlass_dsl/dsl_packages/cutlass"
    wheels = {
        "nvidia_cutlass_dsl": {"nvidia_cutlass_dsl.pth": "import nvidia_cutlass_dsl\n"},
        "nvidia_cutlass_dsl_libs_core": {
            f"{package}/__init__.py": "", COMPILER: "DEFAULT = 3\n", f"{package}/_ir.{tag}.so": f"library {tag}",
        },
        "nvidia_cutlass_dsl_libs_cu12": {f"{package}/cu12.{tag}.so": f"library {tag}"},
    }  # fmt: skip
    for name, files in wheels.items():
        info = f"{name}-4.8.1.dist-info"
        lines = [f"{info}/RECORD,,", f"{info}/METADATA,sha256=x,1", f"{package}/__pycache__/compiler.{tag}.pyc,,"]
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
            value = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={value},{len(text)}")
        (site / info).mkdir(parents=True)
        (site / info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 4.8.1\n"
        )
        (site / info / "RECORD").write_text("\n".join(lines) + "\n")
    return site


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installed compiler; `imported` is the folder that an import of it would run."""
    site = install(tmp_path / "site")
    monkeypatch.setattr(toolchain.metadata, "distributions", lambda: metadata.Distribution.discover(path=[str(site)]))
    monkeypatch.setattr(toolchain, "_import_root", lambda: str((site / COMPILER).parent))
    return site


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


PLAIN = {f"nvidia-cutlass-dsl{name}": "4.8.1" for name in ("", "-libs-core", "-libs-cu12")}


def test_the_files_of_the_wheels_are_named_by_their_version(site, cache):
    assert toolchain.distributions(cache) == PLAIN
    (site / "nvidia_cutlass_dsl/dsl_packages/cutlass/__pycache__").mkdir()
    (site / "nvidia_cutlass_dsl/dsl_packages/cutlass/__pycache__/compiler.cp311.pyc").write_text("any")
    (site / "nvidia_cutlass_dsl/dsl_packages/cutlass/notes.txt").write_text("any")
    assert toolchain.distributions(cache) == PLAIN


def same_size_and_time(path, text):
    """Replaces a file as rsync and tar do."""
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_text(text)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_file_of_other_content_counts_although_size_and_time_are_the_same(site, cache):
    assert toolchain.distributions(cache) == PLAIN
    same_size_and_time(site / COMPILER, "DEFAULT = 1\n")
    one = toolchain.distributions(cache)
    assert one["nvidia-cutlass-dsl-libs-core"].startswith("4.8.1+local.")
    assert {name: value for name, value in one.items() if value == "4.8.1"}.keys() == PLAIN.keys() - {
        "nvidia-cutlass-dsl-libs-core"
    }
    same_size_and_time(site / COMPILER, "DEFAULT = 2\n")
    assert toolchain.distributions(cache) != one
    assert "local" in toolchain_label(one)
    same_size_and_time(site / COMPILER, "DEFAULT = 3\n")
    assert toolchain.distributions(cache) == PLAIN


def test_a_file_that_is_gone_or_added_counts(site, cache):
    added = site / "nvidia_cutlass_dsl/dsl_packages/cutlass/compiler/__init__.py"  # is imported before compiler.py
    added.parent.mkdir()
    added.write_text("DEFAULT = 1\n")
    assert toolchain.distributions(cache)["nvidia-cutlass-dsl"].startswith("4.8.1+local.")
    added.unlink()
    assert toolchain.distributions(cache) == PLAIN
    (site / COMPILER).unlink()
    assert toolchain.distributions(cache)["nvidia-cutlass-dsl-libs-core"].startswith("4.8.1+local.")


def test_an_installation_without_a_wheel_counts_by_its_content(site, cache, tmp_path, monkeypatch):
    """As an editable one: an import runs other files than those that were installed."""
    checkout = tmp_path / "checkout" / "cutlass"
    checkout.mkdir(parents=True)
    (checkout / "compiler.py").write_text("DEFAULT = 3\n")
    monkeypatch.setattr(toolchain, "_import_root", lambda: str(checkout))
    one = toolchain.distributions(cache)["nvidia-cutlass-dsl"]
    assert one.startswith("4.8.1+local.")
    (checkout / "compiler.py").write_text("DEFAULT = 1\n")
    assert toolchain.distributions(cache)["nvidia-cutlass-dsl"] != one
    (site / "nvidia_cutlass_dsl_libs_core-4.8.1.dist-info/RECORD").unlink()
    assert toolchain.distributions(cache)["nvidia-cutlass-dsl"] != one


def test_what_is_kept_is_read_again_where_it_cannot_be_trusted(site, cache, monkeypatch):
    read = []
    monkeypatch.setattr(toolchain, "digest", lambda path: read.append(path) or digests.digest(path))
    monkeypatch.setattr(digests, "_SETTLED", 0.0)
    toolchain.distributions(cache)
    assert len(read) == 5
    toolchain.distributions(cache)
    assert len(read) == 5  # kept
    for damage in (b"{", b"[]", b'{"a": 1}'):
        (kept,) = cache.iterdir()
        kept.write_bytes(damage)
        read.clear()
        assert toolchain.distributions(cache) == PLAIN
        assert len(read) == 5
    cache.chmod(0o777)  # anybody could have written there
    toolchain.distributions(cache)
    assert len(read) == 10
    cache.chmod(0o700)
    monkeypatch.setattr(digests, "_SETTLED", 1e9)  # too young to be kept
    for _ in range(2):
        read.clear()
        same_size_and_time(site / COMPILER, "DEFAULT = 3\n")
        toolchain.distributions(cache)
        toolchain.distributions(cache)
        assert len(read) > 1


KEYS = """
import json, sys
sys.path[:0] = sys.argv[1:]
from fusekit.compiler.identity import Identity
from fusekit.spec import find
from fusekit.store import key_of
identity = Identity()
assert set(identity.toolchain.values()) == {"4.8.1"}, identity.toolchain
print(json.dumps({f"{s.full_name} {s.arch}": key_of(identity.key_fields(s)) for s in find([]) if s.op != "extern"}))
"""


def interpreter(version):
    """A Python of that version without packages; None where there is none."""
    there = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(there[0]) if there else shutil.which(f"python{version}")


def test_keys_do_not_depend_on_the_python_that_makes_them(tmp_path):
    """One store serves all of them: the libraries of the compiler differ there, the cubins do not."""
    keys = {}
    shutil.copytree(Path(platformdirs.__file__).parent, tmp_path / "needed" / "platformdirs")
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            continue
        site = install(tmp_path / version, "cp" + version.replace(".", ""))
        package = site / "nvidia_cutlass_dsl/dsl_packages"
        paths = [str(item) for item in (package, site, ROOT, tmp_path / "needed")]
        done = subprocess.run(
            [python, "-B", "-S", "-c", KEYS, *paths], cwd=tmp_path, env={"HOME": str(tmp_path)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        keys[version] = json.loads(done.stdout)
    if len(keys) < 2:
        pytest.skip(f"Python {' and '.join({*PYTHONS} - keys.keys())} are not installed")
    first, *others = keys.values()
    assert len(set(first.values())) > 100
    assert all(other == first for other in others)


def test_every_option_of_the_cubin_that_has_a_default_is_named():
    compiler = pytest.importorskip("cutlass.base_dsl.compiler", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.capture import _OF_NO_CUBIN

    defaults = {
        kind._cli_flag or kind.__name__: value
        for kind, option in compiler.CompileOptions().options.items()
        if (value := option.value) and kind._cli_flag not in _OF_NO_CUBIN
    }
    assert defaults == {"opt-level": 3}
    assert "--opt-level=3 " in compile_options("sm_90a")
    parsed = compiler._parse_compile_options_from_str(f"{compile_options('sm_90a')} --opt-level=1")
    assert parsed.options[compiler.OptLevel].value == 1  # a kernel's own options come after


def test_this_installation_is_that_of_the_wheels():
    if sys.modules.get("cutlass") is None and not metadata.packages_distributions().get("nvidia_cutlass_dsl"):
        pytest.skip("the CuTe DSL (extra `build`) is not installed")
    assert not any("local" in distribution for distribution in toolchain.distributions().values())
