"""Compile processes run modules from their source, wherever these are: never from byte code of another text."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.compiler import fresh
from fusekit.compiler.identity import key_fields_for
from fusekit.compiler.worker import Job, _same_spec
from fusekit.errors import BuildError
from fusekit.spec import find

PROGRAM = """
import sys
sys.path[:] = sys.argv[2:]
from fusekit.compiler import fresh
fresh.install(sys.argv[1])
import stale
print(stale.VALUE)
"""


def imported(folder, kept):
    paths = [str(folder), *sys.path]
    command = [sys.executable, "-P", "-c", PROGRAM, kept, *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(source, value):
    """As a copy that keeps times: the same size, the same second."""
    source.write_text(f"VALUE = {value}")
    os.utime(source, (1e9, 1e9))


@pytest.mark.parametrize("place", ["plain", "lib/python3/site-packages", "lib/python3/dist-packages"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_byte_code_of_another_text_is_not_taken(tmp_path, place, keeps):
    folder, cache = tmp_path / place, tmp_path / "cache"
    folder.mkdir(parents=True)
    cache.mkdir()
    source = folder / "stale.py"
    write(source, 4)
    py_compile.compile(source)
    kept = str(cache) if keeps else ""
    assert imported(folder, kept).stdout == "4\n"
    assert len(list(cache.iterdir())) == keeps
    write(source, 8)
    plain = [sys.executable, "-c", "import stale; print(stale.VALUE)"]
    assert (
        subprocess.run(plain, cwd=folder, capture_output=True, text=True, check=True).stdout == "4\n"
    )  # Python itself
    for _ in range(2):
        done = imported(folder, kept)
        assert done.stdout == "8\n", done.stderr


def test_kept_code_that_is_damaged_is_compiled_again(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    write(tmp_path / "stale.py", 4)
    assert imported(tmp_path, str(cache)).stdout == "4\n"
    for file in cache.iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-9] + b"\0" + data[-8:])
    done = imported(tmp_path, str(cache))
    assert done.stdout == "4\n", done.stderr


def test_a_module_without_its_source_is_refused(tmp_path):
    write(tmp_path / "stale.py", 4)
    py_compile.compile(tmp_path / "stale.py", cfile=tmp_path / "stale.pyc")
    (tmp_path / "stale.py").unlink()
    done = imported(tmp_path, "")
    assert "stale.pyc is byte code without its source, which no key can name" in done.stderr


def test_only_the_standard_library_is_imported_from_byte_code():
    assert fresh.standard(os.__file__)
    assert not fresh.standard(pytest.__file__)
    assert not fresh.standard(fresh.__file__)
    assert not fresh.standard(str(Path(os.__file__).with_name("site-packages") / "x.py"))


def test_what_the_builder_read_out_of_the_spec_is_compared_with_the_sources():
    """Its own modules may be of byte code of other sources, or have been imported before an edit."""
    (spec,) = find(["quickstart/linear"])[:1]
    fields = key_fields_for(spec)
    _same_spec(Job("a/b", None, spec, fields))
    for change in ({"spec.tile": "[1,1]"}, {"options": "--opt-level=1"}, {"spec.another": "1"}):
        with pytest.raises(BuildError, match=rf"a/b: {next(iter(change))}: .*start it again.*__pycache__"):
            _same_spec(Job("a/b", None, spec, fields | change))
